"""Message ids, and the stable hash that gives every ordering key its partition."""

from __future__ import annotations

import hashlib
import secrets
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from uuid import UUID

if sys.version_info >= (3, 14):
    from uuid import uuid7
else:
    from uuid_utils.compat import uuid7

PARTITIONS = 64
"""How many partitions there are: part of the schema, not a setting, so that no two processes can disagree."""


def new_message_id() -> UUID:
    """Return a UUID version 7 (RFC 9562). Its order is nearly creation order and is never used as delivery order."""
    return uuid7()


def partition_of(key: str | None) -> int:
    """Return the partition of an ordering key, the same in every process and Python version.

    Messages without a key are spread evenly at random.
    """
    if key is None:
        return secrets.randbelow(PARTITIONS)
    digest = hashlib.blake2b(key.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") % PARTITIONS
