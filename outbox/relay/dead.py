"""Retrying and discarding dead letters, in batches, while relays and other operators are at work."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from outbox.letters import AT_ONCE, Batches
from outbox.states import State
from outbox.store import claim, dead, settle
from outbox.store.dialects import limit_statements

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from datetime import datetime

    import sqlalchemy as sa

    from outbox.store.dead import Selection
    from outbox.tables import Tables

_UNBLOCK_AT_ONCE = 1000
_STATEMENT_LIMIT_S = 60.0


class RelayLetters:
    """The dead letters of the outbox, as `outbox.letters.Letters`."""

    def __init__(self, connection: sa.Connection, tables: Tables) -> None:
        self._connection = connection
        self._tables = tables

    def clock(self) -> datetime:
        """Return the database's clock."""
        with self._connection.begin():
            return dead.clock(self._connection)

    def count(self, selection: Selection) -> int:
        """Return how many are selected."""
        with self._connection.begin():
            return dead.count(self._connection, self._tables, selection)

    def find(self, selection: Selection, *, after: int = 0, limit: int, whole: bool = False) -> list[dict[str, Any]]:
        """Return those selected with an id above `after`, in id order."""
        with self._connection.begin():
            return dead.find(self._connection, self._tables, selection, after=after, limit=limit, whole=whole)

    def retry(self, selection: Selection) -> Iterator[int]:
        """See `retry`."""
        return retry(self._connection, self._tables, selection)

    def discard(self, selection: Selection) -> Iterator[int]:
        """See `discard`."""
        return discard(self._connection, self._tables, selection)


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
    place = tables.partition.c.partition
    batches = Batches(tables, selection, place=place, change=lambda _connection, ids: change(ids), at_once=AT_ONCE)
    while not batches.over:
        with _begin(connection):
            changed = batches.take(connection)
        yield changed  # with no transaction open, whatever the caller does with it


@contextmanager
def _begin(connection: sa.Connection) -> Iterator[None]:
    with connection.begin():
        limit_statements(connection, _STATEMENT_LIMIT_S)
        yield
