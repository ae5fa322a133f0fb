"""A message as a row of `failed_messages`, and back: what an AMQP header may hold, and JSON may not, is kept too."""

from __future__ import annotations

import hashlib
import math
from base64 import b64decode, b64encode
from datetime import datetime
from decimal import Decimal
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from outbox.inbox.message import Message
from outbox.reasons import UNSTORABLE, storable

if TYPE_CHECKING:
    from collections.abc import Mapping

_LONGEST = 255  # an index holds it


def to_row(consumer: str, message: Message) -> dict[str, Any]:
    """Return the columns that hold a message. One without an id is filed under the digest of what it consists of."""
    return {
        "consumer": consumer,
        "message_id": storable_id(message),
        "topic": storable(message.topic),
        "key": _key(message.key),
        "type": None if message.type is None else storable(message.type),
        "content_type": None if message.content_type is None else storable(message.content_type),
        "payload": message.payload,
        "headers": {storable(name): _plain(value) for name, value in message.headers.items()},
    }


def from_row(row: Mapping[str, Any]) -> Message:
    """Return the message that the columns hold."""
    return Message(
        message_id="" if row["message_id"].startswith(_NO_ID) else row["message_id"],
        topic=row["topic"],
        payload=bytes(row["payload"]),
        key=row["key"],
        type=row["type"],
        content_type=row["content_type"],
        headers=MappingProxyType({name: _whole(value) for name, value in row["headers"].items()}),
        redelivered=True,
    )


_NO_ID = "without id: "
_UNUSABLE = "unusable id: "


def storable_id(message: Message) -> str:
    """Return what identifies a message here: its id, or for one that is missing or no database could store a digest."""
    given = message.message_id
    if given and len(given) <= _LONGEST and not UNSTORABLE.search(given):
        return given
    digest = hashlib.sha256(message.payload + b"\0" + message.topic.encode(errors="replace") + given.encode(errors="replace"))
    return (_UNUSABLE if given else _NO_ID) + digest.hexdigest()


def _key(key: str | None) -> str | None:
    if key is None or (len(key.encode(errors="replace")) <= _LONGEST and not UNSTORABLE.search(key)):
        return key or None
    return "digest: " + hashlib.sha256(key.encode(errors="backslashreplace")).hexdigest()


def _plain(value: Any) -> Any:
    """Return a header's value as JSON; what JSON has no word for becomes an object with one name that begins with a dollar."""
    match value:
        case float() if not math.isfinite(value):
            return {"$float": str(value)}
        case None | bool() | int() | float():
            return value
        case str():
            return {"$text": b64encode(value.encode(errors="surrogatepass")).decode()} if UNSTORABLE.search(value) else value
        case bytes() | bytearray() | memoryview():
            return {"$bytes": b64encode(bytes(value)).decode()}
        case datetime():
            return {"$datetime": value.isoformat()}
        case Decimal():
            return {"$decimal": str(value)}
        case list() | tuple():
            return [_plain(each) for each in value]
        case dict():
            return {"$dict": [[storable(str(name)), _plain(each)] for name, each in value.items()]}
        case _:
            return storable(str(value))


def _whole(value: Any) -> Any:
    match value:
        case {"$bytes": text}:
            return b64decode(text)
        case {"$text": text}:
            return b64decode(text).decode(errors="surrogatepass")
        case {"$datetime": text}:
            return datetime.fromisoformat(text)
        case {"$float": text}:
            return float(text)
        case {"$decimal": text}:
            return Decimal(text)
        case {"$dict": pairs}:
            return {name: _whole(each) for name, each in pairs}
        case list():
            return [_whole(each) for each in value]
        case _:
            return value
