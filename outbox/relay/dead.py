"""Retrying and discarding dead letters, in batches, while relays and other operators are at work."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

from outbox.states import State
from outbox.store import claim, dead, settle
from outbox.store.dialects import limit_statements

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import sqlalchemy as sa

    from outbox.store.dead import Selection
    from outbox.tables import Tables

AT_ONCE = 500
_UNBLOCK_AT_ONCE = 1000
_STATEMENT_LIMIT_S = 60.0


def retry(connection: sa.Connection, tables: Tables, selection: Selection) -> Iterator[int]:
    """Make dead messages deliverable again; yield, after the commit of each batch, how many it has changed.

    They keep their ids, so they are published in their old places: in id order within a key, and behind an earlier message
    of the key that is backing off or still dead. One that dies again meanwhile is left alone: each is retried once.
    """
    return _in_batches(connection, tables, selection, lambda ids: dead.retry(connection, tables, selection, ids))


def discard(connection: sa.Connection, tables: Tables, selection: Selection) -> Iterator[int]:
    """Delete dead messages for good; yield, after the commit of each batch, how many it has deleted.

    What was blocked behind one goes on, unless another message of its key still holds it back.
    """
    return _in_batches(connection, tables, selection, lambda ids: _discard(connection, tables, selection, ids))


def _discard(connection: sa.Connection, tables: Tables, selection: Selection, ids: list[int]) -> int:
    discarded, keys = dead.discard(connection, tables, selection, ids)
    # If the first that holds a key back is backing off or dead, all behind it waits for that one. If it is one that waits
    # itself, then nothing is left that it could wait for.
    holders = claim.holders(connection, tables, keys) if keys else {}
    free = sorted(key for key, holder in holders.items() if holder.state is State.BLOCKED)
    if free:
        settle.unblock(connection, tables, free, most=_UNBLOCK_AT_ONCE)
    return discarded


def _in_batches(
    connection: sa.Connection, tables: Tables, selection: Selection, change: Callable[[list[int]], int]
) -> Iterator[int]:
    after, done, left = 0, False, list[dead.Chosen]()
    while left or not done:
        with _begin(connection):
            if not left:
                left = dead.choose(connection, tables, selection, after=after, limit=AT_ONCE)
                done = len(left) < AT_ONCE
                after = left[-1].id if left else after
            mine, left = _locked(connection, tables, left)
            changed = change(mine) if mine else 0
        yield changed  # with no transaction open, whatever the caller does with it


def _locked(connection: sa.Connection, tables: Tables, chosen: list[dead.Chosen]) -> tuple[list[int], list[dead.Chosen]]:
    """Lock what can be locked without a deadlock; return the ids in these partitions, and what is left for the next time."""
    partitions = {each.partition for each in chosen}
    if not partitions:
        return [], []
    held = dead.lock_free(connection, tables, partitions) or dead.lock_one(connection, tables, min(partitions))
    return [each.id for each in chosen if each.partition in held], [each for each in chosen if each.partition not in held]


@contextmanager
def _begin(connection: sa.Connection) -> Iterator[None]:
    with connection.begin():
        limit_statements(connection, _STATEMENT_LIMIT_S)
        yield
