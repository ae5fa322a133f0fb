"""Settling: writing down what became of a claimed batch. Every function but `release` needs what `release` has returned."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import sqlalchemy as sa

from outbox.sqltypes import later, now
from outbox.states import State
from outbox.store.claim import held_leases
from outbox.store.dialects import is_in
from outbox.store.plans import exactly
from outbox.tables import HELD

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from outbox.tables import Tables


def release(
    connection: sa.Connection,
    tables: Tables,
    leases: Mapping[int, int],
    *,
    published: Mapping[int, int] | None = None,
    failed: Mapping[int, int] | None = None,
) -> set[int]:
    """Give back the leases that still carry their token, add to their totals, and return their partitions.

    For a partition that is not returned the caller has been fenced: another relay has it, or had it, and nothing may be
    written about its messages. Locks the partitions' rows until the end of the transaction, so that no other relay can
    lease them before the outcomes are written.
    """
    if not leases:
        return set()
    partition = tables.partition
    released = connection.execute(
        sa.update(partition)
        .where(held_leases(tables, leases))
        .values(
            lease_owner=None,
            lease_until=None,
            published=partition.c.published + _by_partition(tables, published),
            failed=partition.c.failed + _by_partition(tables, failed),
        )
        .returning(partition.c.partition)
    )
    return {row.partition for row in released}


def delete_sent(connection: sa.Connection, tables: Tables, ids: Sequence[int]) -> None:
    """Delete messages that were published, by `outbox_message_pk`."""
    message = tables.message
    connection.execute(sa.delete(message).where(is_in(connection, message.c.id, ids)))


def schedule(connection: sa.Connection, tables: Tables, failures: Sequence[Mapping[str, Any]]) -> None:
    """Let messages wait for their next try: each with `row_id`, `delay_s` (seconds), `attempts_spent` and `error`."""
    connection.execute(
        _failure(tables).values(state=State.SCHEDULED, available_at=later(sa.bindparam("delay_s", type_=sa.Float))), failures
    )


def bury(connection: sa.Connection, tables: Tables, failures: Sequence[Mapping[str, Any]]) -> None:
    """Give messages up: each with `row_id`, `attempts_spent` and `error`."""
    connection.execute(_failure(tables).values(state=State.DEAD, dead_at=now()), failures)


def block(connection: sa.Connection, tables: Tables, ids: Sequence[int]) -> None:
    """Let messages wait behind an earlier one of their key, out of the way of the claim."""
    message = tables.message
    connection.execute(sa.update(message).where(is_in(connection, message.c.id, ids)).values(state=State.BLOCKED))


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
        sa.update(message).where(message.c.id.in_(sa.select(first.c.id))).values(state=State.PENDING),
        [{"held_key": key, "of_each": of_each} for key in keys],
    )


def _failure(tables: Tables) -> sa.Update:
    message = tables.message
    return (
        sa.update(message)
        .where(message.c.id == sa.bindparam("row_id"))
        .values(attempts=sa.bindparam("attempts_spent"), last_error=sa.bindparam("error"))
    )


def _by_partition(tables: Tables, counts: Mapping[int, int] | None) -> sa.ColumnElement[int]:
    if not counts:
        return sa.literal(0)
    return sa.case(counts, value=tables.partition.c.partition, else_=0)
