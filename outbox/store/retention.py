"""Retention: deleting what has been kept long enough, the oldest first, in batches that are short whatever the table's size.

No function waits for a row: what somebody else has locked is left for another time. So no clean-up can deadlock with a
relay, an operator, a consumer or another clean-up.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import sqlalchemy as sa

from outbox.sqltypes import later
from outbox.states import State

if TYPE_CHECKING:
    from datetime import datetime

    from outbox.tables import Tables

_LOCK = 0x6F627863
"""What our advisory locks have in common: "obxc", shown as `classid` in `pg_locks`."""


@dataclass(frozen=True, slots=True)
class Deleted:
    """How many rows a batch has deleted, and the time of the newest of them."""

    count: int
    last: datetime | None


def try_lock(connection: sa.Connection, tables: Tables) -> bool:
    """Become the one who cleans up until the end of the transaction; return False if another one is at it.

    On PostgreSQL an advisory lock of the transaction, not of the session, so that it is safe behind a transaction-pooling
    PgBouncer. Its key is a constant and the oid of `outbox_message`, which stands for the schema however that was named. On
    SQLite the transaction already has the only write lock there is.
    """
    if connection.dialect.name != "postgresql":
        return True
    name = connection.dialect.identifier_preparer.format_table(tables.message)
    locked = sa.text(
        "SELECT pg_try_advisory_xact_lock(CAST(:constant AS int4), CAST(CAST(CAST(:name AS regclass) AS oid) AS int4))"
    )
    return bool(connection.execute(locked, {"constant": _LOCK, "name": name}).scalar_one())


def expire_sent(connection: sa.Connection, tables: Tables, *, older_than_s: float, since: datetime | None, most: int) -> Deleted:
    """Delete up to `most` messages that were sent longer ago than that.

    Walks `outbox_message_sent_ix`, which holds no message in any other state, from `since` or from its start, as far as it
    deletes; one probe when nothing is due. Locks the rows that it deletes.
    """
    message = tables.message
    # The literal lets the planner prove that the partial index covers the query.
    sent = message.c.state == sa.literal_column(f"'{State.SENT}'")
    return _delete_oldest(connection, message, message.c.sent_at, sent, older_than_s=older_than_s, since=since, most=most)


def expire_processed(
    connection: sa.Connection,
    tables: Tables,
    *,
    older_than_s: float,
    since: datetime | None,
    most: int,
    consumer: str | None = None,
) -> Deleted:
    """Delete up to `most` records of messages that `consumer`, or all consumers, handled longer ago than that.

    A message whose lease runs, or ended less long ago, keeps its record. Walks `processed_messages_processed_at_ix` from `since`
    or from its start, as far as it deletes; for one consumer also past what others have kept longer. Locks the rows that it
    deletes: a delivery of such a message that arrives meanwhile waits until they are gone, and is new.
    """
    processed = tables.processed
    whose = sa.true() if consumer is None else processed.c.consumer == consumer
    until = processed.c.lease_until
    unleased = sa.or_(until.is_(None), until <= later(sa.literal(-older_than_s, sa.Float)))
    time, which = processed.c.processed_at, sa.and_(whose, unleased)
    return _delete_oldest(connection, processed, time, which, older_than_s=older_than_s, since=since, most=most)


def expire_relays(
    connection: sa.Connection, tables: Tables, *, older_than_s: float, since: datetime | None, most: int
) -> Deleted:
    """Delete up to `most` relays that were last seen longer ago than that. Reads the whole table, a row for each process start."""
    relay = tables.relay
    return _delete_oldest(connection, relay, relay.c.seen_at, sa.true(), older_than_s=older_than_s, since=since, most=most)


def _delete_oldest(
    connection: sa.Connection,
    table: sa.Table,
    time: sa.ColumnElement[datetime],
    condition: sa.ColumnElement[bool],
    *,
    older_than_s: float,
    since: datetime | None,
    most: int,
) -> Deleted:
    """Delete by physical place, which needs no second index, and as an array, so that the planner cannot join the whole table.

    `since` is where the last batch ended. While a session holds back vacuum, what was deleted stays in the index, and every
    batch from its start would walk past all of it.
    """
    sqlite = connection.dialect.name == "sqlite"
    place: sa.ColumnClause[Any] = sa.literal_column(f"{table.name}.{'rowid' if sqlite else 'ctid'}")
    due = sa.select(place).where(condition, time <= later(sa.literal(-older_than_s, sa.Float)))
    if since is not None:
        due = due.where(time >= since)
    # The inner table has the name of the outer one: correlation would make them one and the same.
    oldest = due.order_by(time).limit(most).with_for_update(skip_locked=True).correlate(None)
    chosen = place.in_(oldest) if sqlite else place == sa.any_(sa.func.array(oldest.scalar_subquery()))
    times = connection.execute(sa.delete(table).where(chosen).returning(time)).scalars().all()
    return Deleted(len(times), max(times, default=None))
