"""The lease on one message of a consumer: taking it, keeping it, and writing the result while it is still held.

Every statement finds its row by the primary key of `processed_messages`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import sqlalchemy as sa

from outbox.sqltypes import UtcDateTime, later, now
from outbox.store.dialects import insert_into

if TYPE_CHECKING:
    from outbox.tables import Tables

PROCESSING = "processing"
DONE = "done"


@dataclass(frozen=True, slots=True)
class Standing:
    """What the record of a message says. `left_s`: how long its lease still runs, in seconds; 0 when it is over, None without."""

    done: bool
    result: Any
    left_s: float | None


def acquire(connection: sa.Connection, tables: Tables, *, consumer: str, message_id: str, lease_s: float) -> int | None:
    """Lease the message if nobody has handled it and nobody holds it; return the fencing token, or None.

    One statement, so that of two workers one waits for the other's COMMIT on the primary key and then sees its lease. A
    look first would show neither of them the other. The row is locked until the COMMIT even where it is left as it is. The token
    only ever grows, also over releases.
    """
    processed = tables.processed
    until = later(sa.literal(lease_s, sa.Float))
    row = {"consumer": consumer, "message_id": message_id, "state": PROCESSING, "token": 1, "lease_until": until}
    taken_over = {"token": processed.c.token + 1, "lease_until": until}
    statement = insert_into(connection, processed).values(row)
    statement = statement.on_conflict_do_update(
        index_elements=[processed.c.consumer, processed.c.message_id],
        set_=taken_over,
        where=sa.and_(processed.c.state == PROCESSING, processed.c.lease_until <= now()),
    )
    token: int | None = connection.execute(statement.returning(processed.c.token)).scalar_one_or_none()
    return token


def standing(connection: sa.Connection, tables: Tables, *, consumer: str, message_id: str) -> Standing | None:
    """Return what the record of a message says; None when there is none. Locks nothing."""
    processed = tables.processed
    clock = sa.type_coerce(now(), UtcDateTime()).label("clock")
    found = sa.select(processed.c.state, processed.c.result, processed.c.lease_until, clock)
    row = connection.execute(found.where(_is(tables, consumer, message_id))).one_or_none()
    if row is None:
        return None
    left_s = None if row.lease_until is None else max(0.0, (row.lease_until - row.clock).total_seconds())
    return Standing(row.state == DONE, row.result, left_s)


def renew(connection: sa.Connection, tables: Tables, *, consumer: str, message_id: str, token: int, lease_s: float) -> bool:
    """Prolong the lease from now on; return whether it was still held. One that is over is, as long as nobody has taken it."""
    held = _held(tables, consumer, message_id, token)
    renewed = sa.update(tables.processed).where(held).values(lease_until=later(sa.literal(lease_s, sa.Float)))
    return connection.execute(renewed).rowcount == 1


def complete(connection: sa.Connection, tables: Tables, *, consumer: str, message_id: str, token: int, result: Any) -> bool:
    """Write the result and that the message is done, under the token; return whether the lease was still held."""
    held = _held(tables, consumer, message_id, token)
    done = {"state": DONE, "lease_until": None, "result": result, "processed_at": now()}
    return connection.execute(sa.update(tables.processed).where(held).values(done)).rowcount == 1


def is_completed(connection: sa.Connection, tables: Tables, *, consumer: str, message_id: str, token: int) -> bool:
    """Tell whether the holder of this token has completed the message. Locks nothing."""
    processed = tables.processed
    mine = sa.and_(_is(tables, consumer, message_id), processed.c.token == token, processed.c.state == DONE)
    return connection.execute(sa.select(processed.c.token).where(mine)).first() is not None


def release(connection: sa.Connection, tables: Tables, *, consumer: str, message_id: str, token: int) -> None:
    """Let the lease end now, if it is still held, so that the next delivery can take it at once.

    The token goes up too: a renewal that is still on its way would otherwise arrive later, and bring the lease back.
    """
    processed = tables.processed
    over = {"lease_until": now(), "token": processed.c.token + 1}
    connection.execute(sa.update(processed).where(_held(tables, consumer, message_id, token)).values(over))


def _is(tables: Tables, consumer: str, message_id: str) -> sa.ColumnElement[bool]:
    processed = tables.processed
    return sa.and_(processed.c.consumer == consumer, processed.c.message_id == message_id)


def _held(tables: Tables, consumer: str, message_id: str, token: int) -> sa.ColumnElement[bool]:
    processed = tables.processed
    return sa.and_(_is(tables, consumer, message_id), processed.c.token == token, processed.c.state == PROCESSING)
