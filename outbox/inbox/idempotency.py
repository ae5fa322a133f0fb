"""The idempotency key of a message: what tells another system that two requests are one."""

from __future__ import annotations

import hashlib
import re

_LONGEST = 255
_PLAIN = re.compile(r"[A-Za-z0-9._-]+")


def idempotency_key(consumer: str, message_id: str) -> str:
    """Return the key for one message of one consumer: the same at every delivery, by every worker, in every release.

    It is `consumer:message_id` where both consist of letters, digits, `.`, `_` and `-` and all of it has at most 255
    characters; otherwise `sha256=` and 64 hexadecimal digits, the SHA-256 of the two in UTF-8 with a NUL between them. Either
    may stand in an HTTP header as it is, and no two pairs of names have the same.
    """
    plain = f"{consumer}:{message_id}"
    if len(plain) <= _LONGEST and _PLAIN.fullmatch(consumer) and _PLAIN.fullmatch(message_id):
        return plain
    return "sha256=" + hashlib.sha256(f"{consumer}\0{message_id}".encode()).hexdigest()
