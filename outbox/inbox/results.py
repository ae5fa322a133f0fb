"""The result of a leased handler, in the form in which every database keeps it."""

from __future__ import annotations

import json
import re
from typing import Any

from outbox.encoding import encode
from outbox.errors import InvalidEvent
from outbox.inbox.errors import InvalidResult

_NUL = re.compile(rb"(?<!\\)(?:\\\\)*\\u0000")  # a NUL as JSON writes it, not a backslash before "u0000"


def storable(result: object) -> Any:
    """Return a result as plain JSON values, encoded as an event's payload is. Raises `InvalidResult`."""
    try:
        encoded = encode(result)
    except InvalidEvent as error:
        raise InvalidResult(str(error).replace("event.payload:", "the handler's result", 1)) from error
    if _NUL.search(encoded):
        raise InvalidResult("the handler's result contains a NUL character, which the database cannot store")
    return json.loads(encoded)
