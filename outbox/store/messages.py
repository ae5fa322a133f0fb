"""Looking at single messages, for operators. Reads only; locks nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import sqlalchemy as sa

if TYPE_CHECKING:
    from uuid import UUID

    from outbox.states import State
    from outbox.tables import Tables

LISTED = (
    "id", "message_id", "topic", "key", "partition", "state", "attempts", "created_at", "available_at", "last_error",
)  # fmt: skip


def find(
    connection: sa.Connection,
    tables: Tables,
    *,
    state: State | None = None,
    topic: str | None = None,
    key: str | None = None,
    after: int = 0,
    limit: int = 50,
) -> list[dict[str, Any]]:
    """Return messages without their payloads, in id order, those with an id above `after`."""
    message = tables.message
    query = sa.select(*(message.c[name] for name in LISTED)).where(message.c.id > after).order_by(message.c.id).limit(limit)
    for column, value in ((message.c.state, state), (message.c.topic, topic), (message.c.key, key)):
        if value is not None:
            query = query.where(column == value)
    return [dict(row) for row in connection.execute(query).mappings()]


def get(connection: sa.Connection, tables: Tables, message_id: UUID) -> dict[str, Any] | None:
    """Return every column of one message, or `None`; a message that was published is no longer there."""
    message = tables.message
    row = connection.execute(sa.select(message).where(message.c.message_id == message_id)).mappings().one_or_none()
    return None if row is None else dict(row)
