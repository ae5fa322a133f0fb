"""Settling: writing down what became of a claimed batch. Every function but `release` needs what `release` has returned."""

from __future__ import annotations

from functools import lru_cache
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import sqlalchemy as sa

from outbox.sqltypes import later, now
from outbox.states import PARKED, State
from outbox.store.claim import LEASE, is_held
from outbox.store.dialects import appended, are_given, as_json, given, is_in, listed
from outbox.store.plans import exactly
from outbox.tables import HELD

MOST_FAILURES = 100
"""How many failures of a message are kept; what a full queue refuses may be tried for ever."""

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from sqlalchemy.sql.dml import ReturningUpdate
    from sqlalchemy.types import TypeEngine

    from outbox.tables import Tables

_NONE: Mapping[int, int] = MappingProxyType({})


def release(
    connection: sa.Connection,
    tables: Tables,
    leases: Mapping[int, int],
    *,
    sent: Sequence[int] = (),
    keep_sent: bool = False,
    published: Mapping[int, int] = _NONE,
    failed: Mapping[int, int] = _NONE,
) -> set[int]:
    """Give back the leases that still carry their token, add to their totals, and return their partitions.

    For a partition that is not returned the caller has been fenced: another relay has it, or had it, and nothing may be
    written about its messages. Locks the partitions' rows until the end of the transaction, so that no other relay can
    lease them before the outcomes are written. Of the messages that were `sent`, by id, those of partitions that are returned are
    deleted, or with `keep_sent` kept until their retention is over; by `outbox_message_pk`, and in the same statement.
    """
    if not leases:
        return set()
    asked = [
        {"place": place, "token": token, "published": published.get(place, 0), "failed": failed.get(place, 0)}
        for place, token in leases.items()
    ]
    dialect = connection.dialect.name
    values: dict[str, Any] = {"leases": as_json(asked)}
    if not sent:
        return set(connection.execute(_release(tables, dialect), values).scalars())
    values["sent"] = given(dialect, sent)
    if dialect != "sqlite":
        return set(connection.execute(_release_and_end(tables, keep_sent=keep_sent), values).scalars())
    held = set(connection.execute(_release(tables, dialect), values).scalars())  # SQLite changes nothing within a WITH
    ended = _end(tables, dialect, tables.message.c.partition.in_(held), keep_sent=keep_sent)
    connection.execute(ended, values)
    return held


@lru_cache
def _release(tables: Tables, dialect: str) -> ReturningUpdate[Any]:
    partition = tables.partition
    totals = {"published": sa.BigInteger(), "failed": sa.BigInteger()}
    lease = listed(dialect, sa.bindparam("leases", type_=sa.Text()), **LEASE, **totals)
    counted = {name: partition.c[name] + lease.c[name] for name in totals}
    update = sa.update(partition).where(is_held(tables, lease)).values(lease_owner=None, lease_until=None, **counted)
    return update.returning(partition.c.partition)


@lru_cache
def _release_and_end(tables: Tables, *, keep_sent: bool) -> sa.Select[Any]:
    held = _release(tables, "postgresql").cte("held")
    ours = tables.message.c.partition.in_(sa.select(held.c.partition))
    ended = _end(tables, "postgresql", ours, keep_sent=keep_sent).returning(tables.message.c.id).cte("ended")
    return sa.select(held.c.partition).add_cte(ended)


def _end(tables: Tables, dialect: str, ours: sa.ColumnElement[bool], *, keep_sent: bool) -> sa.Update | sa.Delete:
    message = tables.message
    sent = sa.and_(are_given(dialect, message.c.id, "sent"), ours)
    if keep_sent:
        return sa.update(message).where(sent).values(state=State.SENT, sent_at=now())
    return sa.delete(message).where(sent)


def schedule(connection: sa.Connection, tables: Tables, failures: Sequence[Mapping[str, Any]]) -> None:
    """Let messages wait for their next try, and later ones of their key behind them.

    Each with `row_id`, `delay_s` (seconds), `attempts_spent`, `error` and `error_kind`.
    """
    _write_failures(connection, _schedule(tables, connection.dialect.name), failures)


@lru_cache
def _schedule(tables: Tables, dialect: str) -> sa.Update:
    failure = listed(dialect, sa.bindparam("failures", type_=sa.Text()), **_FAILURE, delay_s=sa.Float())
    waits = {"state": State.SCHEDULED, "available_at": later(failure.c.delay_s), "holds": tables.message.c.key.is_not(None)}
    return _failed(tables, dialect, failure).values(waits)


def bury(connection: sa.Connection, tables: Tables, failures: Sequence[Mapping[str, Any]]) -> None:
    """Give messages up. Each with `row_id`, `attempts_spent`, `error`, `error_kind` and `holds_key`: whether its key waits."""
    _write_failures(connection, _bury(tables, connection.dialect.name), failures)


@lru_cache
def _bury(tables: Tables, dialect: str) -> sa.Update:
    failure = listed(dialect, sa.bindparam("failures", type_=sa.Text()), **_FAILURE, holds_key=sa.Boolean())
    dead = {"state": State.DEAD, "dead_at": now(), "holds": sa.and_(tables.message.c.key.is_not(None), failure.c.holds_key)}
    return _failed(tables, dialect, failure).values(dead)


def block(connection: sa.Connection, tables: Tables, ids: Sequence[int]) -> None:
    """Let messages wait, out of the way of the claim, and later ones of their key behind them."""
    message = tables.message
    waits = {"state": State.BLOCKED, "holds": message.c.key.is_not(None)}
    connection.execute(sa.update(message).where(is_in(connection, message.c.id, ids)).values(waits))


def park(connection: sa.Connection, tables: Tables, keys: Sequence[str], *, reason: str) -> None:
    """Give up everything that is blocked behind these keys; each goes on holding its key, whatever its own topic's policy is."""
    message = tables.message
    blocked = sa.and_(is_in(connection, message.c.key, keys), message.c.holds, message.c.state == State.BLOCKED)
    error, kind = sa.literal(reason, sa.Text()), sa.literal(PARKED, sa.Text())
    kept = appended(connection.dialect.name, message.c.failures, most=MOST_FAILURES, at=now(), error=error, error_class=kind)
    parked = {"state": State.DEAD, "dead_at": now(), "last_error": error, "error_class": kind, "failures": kept}
    connection.execute(sa.update(message).where(blocked).values(parked))


def unblock(connection: sa.Connection, tables: Tables, keys: Sequence[str], *, most: int) -> None:
    """Make about `most` messages deliverable that are blocked behind these keys: the first ones of each, at least one.

    Walks `outbox_message_held_ix` from the start of each key. What is left stays behind the last of those of its key, which
    unblocks the next when it is sent; so a key of which none was taken would wait for ever.
    """
    message = tables.message
    first = (
        sa.select(message.c.id)
        .where(exactly(message.c.key, sa.bindparam("held_key")), sa.text(HELD), message.c.state == State.BLOCKED)
        .order_by(message.c.key, message.c.id)
        .limit(sa.bindparam("of_each", type_=sa.Integer))
        .cte("first")
    )
    of_each = -(-most // len(keys))
    connection.execute(
        sa.update(message)
        .where(message.c.id.in_(sa.select(first.c.id)))
        .values(state=State.PENDING, holds=False, again=message.c.partition),
        [{"held_key": key, "of_each": of_each} for key in keys],
    )


_FAILURE: dict[str, TypeEngine[Any]] = {
    "row_id": sa.BigInteger(),
    "attempts_spent": sa.Integer(),
    "error": sa.Text(),
    "error_kind": sa.Text(),
}


def _write_failures(connection: sa.Connection, update: sa.Update, failures: Sequence[Mapping[str, Any]]) -> None:
    ids = given(connection.dialect.name, [each["row_id"] for each in failures])
    connection.execute(update, {"failures": as_json(failures), "ids": ids})


def _failed(tables: Tables, dialect: str, failure: sa.FromClause) -> sa.Update:
    """Return the UPDATE that writes down all failures of a batch, by `outbox_message_pk`: one statement, not one for each.

    The ids are given twice, because the join alone could be planned as a walk over everything that waits.
    """
    message = tables.message
    error, kind = failure.c.error, failure.c.error_kind
    return (
        sa.update(message)
        .where(are_given(dialect, message.c.id, "ids"), message.c.id == failure.c.row_id)
        .values(
            attempts=failure.c.attempts_spent,
            last_error=error,
            error_class=kind,
            failures=appended(dialect, message.c.failures, most=MOST_FAILURES, at=now(), error=error, error_class=kind),
        )
    )
