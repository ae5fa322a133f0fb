"""Encrypts an event's payload before it is enqueued, and decrypts a message's payload in its handler: AES-GCM, 256 bits.

The outbox takes bytes as they are, so nothing has to be hooked into it. The name of the key travels as a header, in plain text like
the topic, the ordering key, the type and all headers; only the payload is secret.
"""

from __future__ import annotations

import json
import os
from typing import Any
from uuid import uuid4

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

import outbox
from clinic.keys import keys
from outbox.encoding import encode
from outbox.inbox import Permanent

HEADER = "sealed-with"
CONTENT_TYPE = "application/vnd.clinic.sealed"
_NONCE_BYTES = 12


class Unreadable(Permanent):
    """It was sealed with another key of this name, or changed on its way, or belongs to another message: no retry can help."""


def sealed(topic: str, payload: object, *, key: str | None = None) -> outbox.Event:
    """Return an event that only those who have the keys can read. `key` is the ordering key, and not secret."""
    name, secret = next(iter(keys().items()))
    message_id, nonce = str(uuid4()), os.urandom(_NONCE_BYTES)
    body = nonce + AESGCM(secret).encrypt(nonce, encode(payload), _bound_to(message_id, topic))
    return outbox.Event(
        topic=topic, payload=body, key=key, message_id=message_id, content_type=CONTENT_TYPE, headers={HEADER: name}
    )


def opened(message: outbox.Message) -> Any:
    """Return the payload of a message that `sealed` made. Raises `Unreadable`.

    A key that is not here (yet) is a `KeyError`, and so the message is tried again later.
    """
    secret = keys()[message.headers[HEADER]]
    nonce, body = message.payload[:_NONCE_BYTES], message.payload[_NONCE_BYTES:]
    try:
        return json.loads(AESGCM(secret).decrypt(nonce, body, _bound_to(message.message_id, message.topic)))
    except InvalidTag as error:
        raise Unreadable from error


def _bound_to(message_id: str, topic: str) -> bytes:
    """What is not secret and must be the same at both ends: nobody can put one message's payload into another."""
    return f"{message_id} {topic}".encode()
