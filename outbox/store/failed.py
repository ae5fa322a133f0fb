"""The failed messages of consumers: kept here to be tried again when they are due, or given up and kept for an operator.

A message that fails leaves the broker's queue for this table, so that waiting for its next try blocks nothing. Every function
is for one consumer; none commits.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import sqlalchemy as sa

from outbox.sqltypes import later, now
from outbox.store.dialects import appended, insert_into
from outbox.store.plans import exactly
from outbox.store.settle import MOST_FAILURES

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from outbox.tables import Tables

# Literals, so that the planner can prove that the partial indexes cover a query.
_RETRY: sa.ColumnElement[str] = sa.literal_column("'retry'")
_BLOCKED: sa.ColumnElement[str] = sa.literal_column("'blocked'")
_DEAD: sa.ColumnElement[str] = sa.literal_column("'dead'")


_ONE = ["consumer", "message_id"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """What is written down of one failure. The message is dead if `delay_s`, in seconds until its next try, is None."""

    error: str
    error_class: str
    delay_s: float | None


@dataclass(frozen=True, slots=True)
class Claimed:
    """A failed message whose next try is due: its columns, how many tries were counted with this one, how old it is in seconds."""

    values: Mapping[str, Any]
    attempts: int
    age_s: float


def count(connection: sa.Connection, tables: Tables, message: Mapping[str, Any], *, lease_s: float) -> bool:
    """Count the first try of a message before it begins, and keep others away from it for `lease_s` seconds.

    Returns False, and changes nothing, when the message is in the table already. Looks it up in `failed_messages_message_uq`.
    """
    failed = tables.failed
    counted = insert_into(connection, failed).values(**message, attempts=1, available_at=later(sa.literal(lease_s, sa.Float)))
    counted = counted.on_conflict_do_nothing(index_elements=_ONE)
    return connection.execute(counted.returning(failed.c.id)).first() is not None


def hasten(connection: sa.Connection, tables: Tables, consumer: str, message_id: str, *, delay_s: float) -> None:
    """Let the next try of a message be due in `delay_s` seconds at the latest."""
    failed = tables.failed
    due = later(sa.literal(delay_s, sa.Float))
    late = sa.and_(failed.c.state == _RETRY, failed.c.available_at > due)
    connection.execute(sa.update(failed).where(_is(tables, consumer, message_id), late).values(available_at=due))


def postpone(connection: sa.Connection, tables: Tables, claimed: Claimed, *, delay_s: float) -> None:
    """Give a claimed message back without having tried it: the try does not count, the next is due in `delay_s` seconds."""
    failed = tables.failed
    untouched = sa.and_(failed.c.id == claimed.values["id"], failed.c.attempts == claimed.attempts)
    due = later(sa.literal(delay_s, sa.Float))
    connection.execute(sa.update(failed).where(untouched).values(attempts=failed.c.attempts - 1, available_at=due))


def record(connection: sa.Connection, tables: Tables, message: Mapping[str, Any], failure: Failure, *, attempts: int) -> bool:
    """Write down that a try has failed, with how many there were: the message is tried again later, or dead.

    Returns False, and changes nothing, when another try has been counted since: then this one was taken for dead. Looks
    the row up in `failed_messages_message_uq`, and locks it.
    """
    failed = tables.failed
    dead = failure.delay_s is None
    outcome: dict[str, Any] = {
        "state": _DEAD if dead else _RETRY,
        "available_at": later(sa.literal(failure.delay_s or 0.0, sa.Float)),
        "dead_at": now() if dead else None,
        "last_error": failure.error,
        "error_class": failure.error_class,
        "attempts": attempts,
    }
    entry = {"error": sa.literal(failure.error, sa.Text), "error_class": sa.literal(failure.error_class, sa.Text)}
    none = sa.literal([], failed.c.failures.type)
    first = appended(connection.dialect.name, none, most=MOST_FAILURES, at=now(), **entry)
    more = appended(connection.dialect.name, failed.c.failures, most=MOST_FAILURES, at=now(), **entry)
    statement = insert_into(connection, failed).values(**message, **outcome, failures=first)
    written = statement.on_conflict_do_update(
        index_elements=_ONE,
        set_={**outcome, "failures": more},
        where=failed.c.attempts <= attempts,
    )
    return connection.execute(written.returning(failed.c.id)).first() is not None


def claim(connection: sa.Connection, tables: Tables, consumer: str, *, most: int, lease_s: float) -> list[Claimed]:
    """Take up to `most` messages whose next try is due, counted before it begins, and keep others away for `lease_s` seconds.

    Walks `failed_messages_due_ix` from its start; what another consumer has just locked is skipped. A process that dies
    with them leaves them to be due again when the lease is over, with the try counted.
    """
    failed = tables.failed
    due = (
        sa.select(failed.c.id)
        .where(failed.c.consumer == consumer, failed.c.state == _RETRY, failed.c.available_at <= now())
        .order_by(failed.c.available_at)
        .limit(most)
        .with_for_update(skip_locked=True)
    )
    ids = list(connection.execute(due).scalars())
    if not ids:
        return []
    taken = (
        sa.update(failed)
        .where(failed.c.id.in_(ids))
        .values(attempts=failed.c.attempts + 1, available_at=later(sa.literal(lease_s, sa.Float)))
        .returning(*failed.c)
    )
    rows = sorted(connection.execute(taken).mappings().all(), key=lambda row: row["id"])
    return [Claimed(dict(row), row["attempts"], _age_s(row, lease_s)) for row in rows]


def clear(
    connection: sa.Connection, tables: Tables, consumer: str, message_id: str, *, waits_for_dead: Callable[[str], bool]
) -> bool:
    """Forget a message that is done, and let the next one of its key be tried; tell whether there was one. See `unblock`."""
    failed = tables.failed
    done = sa.delete(failed).where(_is(tables, consumer, message_id)).returning(failed.c.key)
    found = connection.execute(done).first()
    if found is None or found.key is None:
        return False
    return unblock(connection, tables, consumer, found.key, waits_for_dead=waits_for_dead)


def check(connection: sa.Connection, tables: Tables) -> None:
    """Read nothing of either table of the inbox; fails where one of them is missing."""
    for table in (tables.processed, tables.failed):
        connection.execute(sa.select(table).limit(0))


def wait_behind(connection: sa.Connection, tables: Tables, message: Mapping[str, Any], *, dead_block: bool) -> bool:
    """Put a message into the table, to wait, if an earlier one of its key is there; tell whether it was so.

    Walks `failed_messages_key_ix`. Locks the first of the key against being cleared meanwhile: whoever clears it then sees this
    one, which could otherwise wait for nobody.
    """
    failed = tables.failed
    others = [failed.c.consumer == message["consumer"], exactly(failed.c.key, message["key"])]
    others.append(failed.c.message_id != message["message_id"])
    if not dead_block:
        others.append(failed.c.state != _DEAD)
    head = sa.select(failed.c.id).where(*others).order_by(failed.c.key, failed.c.id).limit(1).with_for_update(read=True)
    if connection.execute(head).first() is None:
        return False
    waits = insert_into(connection, failed).values(**message, state=_BLOCKED)
    connection.execute(waits.on_conflict_do_nothing(index_elements=_ONE))
    return True


def unblock(connection: sa.Connection, tables: Tables, consumer: str, key: str, *, waits_for_dead: Callable[[str], bool]) -> bool:
    """Let the first message of a key be tried that waits, unless another one is being tried; tell whether there was one.

    If one of its topic `waits_for_dead` ones, as in `wait_behind`, it waits on while an earlier one of the key is dead. Walks
    `failed_messages_key_ix` over what stands before it in the key.
    """
    failed, other = tables.failed, tables.failed.alias("other")
    waiting = sa.select(failed.c.id, failed.c.topic).where(
        failed.c.consumer == consumer, exactly(failed.c.key, key), failed.c.state == _BLOCKED
    )
    first = connection.execute(waiting.order_by(failed.c.key, failed.c.id).limit(1)).first()
    if first is None:
        return False
    holds = other.c.state == _RETRY
    if waits_for_dead(first.topic):
        holds |= sa.and_(other.c.state == _DEAD, other.c.id < first.id)
    held = sa.exists().where(other.c.consumer == consumer, other.c.key == key, holds)
    freed = sa.update(failed).where(failed.c.id == first.id, failed.c.state == _BLOCKED, ~held)
    return connection.execute(freed.values(state=_RETRY, available_at=now()).returning(failed.c.id)).first() is not None


def _age_s(row: sa.RowMapping, lease_s: float) -> float:
    since = row["available_at"] - row["received_at"]  # both are the database's time, and one is just now and the lease
    return float(since.total_seconds() - lease_s)


def _is(tables: Tables, consumer: str, message_id: str) -> sa.ColumnElement[bool]:
    return sa.and_(tables.failed.c.consumer == consumer, tables.failed.c.message_id == message_id)
