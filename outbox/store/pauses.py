"""Pauses: topics whose messages wait until an operator resumes them. A row of `outbox_pause` is active until `resumed_at`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import sqlalchemy as sa

from outbox.sqltypes import UtcDateTime, now
from outbox.states import State
from outbox.store.dialects import insert_into, is_in
from outbox.store.plans import exactly

if TYPE_CHECKING:
    from collections.abc import Sequence

    from outbox.tables import Tables


@dataclass(frozen=True, slots=True)
class Pause:
    """A pattern of topics that is paused, for how many seconds, and whether a resume has begun and not yet ended."""

    topics: str
    paused_for_s: float
    resuming: bool


def active(connection: sa.Connection, tables: Tables) -> list[str]:
    """Return the patterns that are paused now. Reads `outbox_pause`, a handful of rows, and locks nothing."""
    return list(connection.execute(sa.select(tables.pause.c.topics).where(is_active(tables))).scalars())


def is_active(tables: Tables) -> sa.ColumnElement[bool]:
    """Return the condition that selects the pauses that have not ended.

    The claim looks at them under its leases, in a later statement: only so does `wait_for_claims` divide the claims into those that
    saw a pause and have committed, and those that do not see it.
    """
    return tables.pause.c.resumed_at.is_(None)


def listed(connection: sa.Connection, tables: Tables) -> list[Pause]:
    """Return every pause, also those that are being resumed, for people. Locks nothing."""
    pause = tables.pause
    clock = sa.type_coerce(now(), UtcDateTime())
    rows = connection.execute(sa.select(pause, clock.label("clock")).order_by(pause.c.topics)).all()
    return [
        Pause(row.topics, max(0.0, round((row.clock - row.paused_at).total_seconds(), 3)), row.resumed_at is not None)
        for row in rows
    ]


def add(connection: sa.Connection, tables: Tables, topics: str) -> bool:
    """Pause a pattern; return whether it was not active already. One that is being resumed is paused again, from now.

    Writes one row by `outbox_pause_pk`. One statement, because of two sessions that pause the same pattern at once: the
    second waits for the first, and then finds it active.
    """
    pause = tables.pause
    again = {"paused_at": now(), "resumed_at": None}
    written = connection.execute(
        insert_into(connection, pause)
        .values(topics=topics)
        .on_conflict_do_update(index_elements=[pause.c.topics], set_=again, where=pause.c.resumed_at.is_not(None))
        .returning(pause.c.topics)
    )
    return written.first() is not None


def wait_for_claims(connection: sa.Connection, tables: Tables) -> None:
    """Wait until no claim and no settle is under way, and let none begin before this transaction has ended.

    They all write `outbox_partition` before they move a message out of `pending` or `blocked`. An EXCLUSIVE lock on that
    table, and not FOR UPDATE on its 64 rows: a settle updates several rows in the order in which they lie in the table, so
    two holders of some rows each could wait for one another. It lets readers through, and whoever waits for it holds no row
    that our transactions want. SQLite has one writer at a time, and this transaction is it (see `store.engine`).
    """
    if connection.dialect.name == "postgresql":
        table = connection.dialect.identifier_preparer.format_table(tables.partition)
        connection.exec_driver_sql(f"LOCK TABLE {table} IN EXCLUSIVE MODE")


def end(connection: sa.Connection, tables: Tables, topics: str) -> bool:
    """Let later claims ignore a pause; return whether there is one. By `outbox_pause_pk`; needs `wait_for_claims` first."""
    pause = tables.pause
    ended = {"resumed_at": sa.func.coalesce(pause.c.resumed_at, now())}
    return bool(connection.execute(sa.update(pause).where(pause.c.topics == topics).values(ended)).rowcount)


def delete(connection: sa.Connection, tables: Tables, topics: str) -> bool:
    """Forget a pause that was resumed to the end; return whether it was there, and nobody has paused it again meanwhile."""
    pause = tables.pause
    gone = sa.delete(pause).where(pause.c.topics == topics, pause.c.resumed_at.is_not(None))
    return bool(connection.execute(gone).rowcount)


def next_blocked_topic(connection: sa.Connection, tables: Tables, *, after: str) -> str | None:
    """Return the first topic after `after` that has blocked messages.

    One probe of `outbox_message_blocked_ix`: so all topics are found without reading a row more than there are topics.
    """
    message = tables.message
    query = sa.select(message.c.topic).where(_blocked(message), message.c.topic > after)
    return connection.execute(query.order_by(message.c.topic, message.c.id).limit(1)).scalar_one_or_none()


def count_blocked(connection: sa.Connection, tables: Tables, topic: str) -> tuple[int, int]:
    """Return how many messages of a topic are blocked, and the highest id among them (0 if none).

    Walks the topic's part of `outbox_message_blocked_ix`: about 0.2 s for a million.
    """
    message = tables.message
    query = sa.select(sa.func.count(), sa.func.max(message.c.id)).where(_blocked(message), message.c.topic == topic)
    number, last = connection.execute(query).one()
    return number, last or 0


def blocked_ids(connection: sa.Connection, tables: Tables, topic: str, *, after: int, last: int, limit: int) -> Sequence[int]:
    """Return up to `limit` ids of a topic's blocked messages, in order, above `after` and up to `last`.

    Walks `outbox_message_blocked_ix` from `after` on, so that the rows moved before, dead until vacuum, are not met again.
    """
    message = tables.message
    query = sa.select(message.c.id).where(
        _blocked(message), exactly(message.c.topic, topic), message.c.id > after, message.c.id <= last
    )
    return connection.execute(query.order_by(message.c.topic, message.c.id).limit(limit)).scalars().all()


def unblock(connection: sa.Connection, tables: Tables, ids: Sequence[int]) -> None:
    """Make blocked messages deliverable, by `outbox_message_pk`; needs `wait_for_claims` in the same transaction."""
    message = tables.message
    deliverable: dict[str, Any] = {"state": State.PENDING, "holds": False, "again": message.c.partition}
    waiting = sa.and_(is_in(connection, message.c.id, ids), message.c.state == State.BLOCKED)
    connection.execute(sa.update(message).where(waiting).values(deliverable))


def _blocked(message: sa.FromClause) -> sa.ColumnElement[bool]:
    # The literal lets the planner prove that the partial index covers the query.
    return message.c.state == sa.literal_column(f"'{State.BLOCKED}'")
