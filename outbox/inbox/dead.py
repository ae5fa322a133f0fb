"""Retrying and discarding what a consumer has given up, in batches, while consumers and other operators are at work."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

from outbox.inbox.busy import bound_waits
from outbox.letters import AT_ONCE, Batches
from outbox.store import dead, failed, given_up
from outbox.store.dialects import take_turns

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator
    from datetime import datetime

    import sqlalchemy as sa

    from outbox.inbox.inbox import Inbox
    from outbox.inbox.processing import Run
    from outbox.store.dead import Selection

R = TypeVar("R")

_LOCK_LIMIT_S = 60.0
_IDLE_LIMIT_S = 10.0


class FailedLetters:
    """The dead letters of one consumer, as `outbox.letters.Letters`, in the transactions of its inbox. `run` as of `processing`."""

    def __init__(self, inbox: Inbox, run: Run) -> None:
        self._inbox = inbox
        self._run = run
        self._tables = inbox.tables

    def clock(self) -> datetime:
        """Return the database's clock."""
        return self._in_transaction(dead.clock)

    def count(self, selection: Selection) -> int:
        """Return how many are selected."""
        mine = self._mine(selection)
        return self._in_transaction(lambda connection: dead.count(connection, self._tables, mine))

    def find(self, selection: Selection, *, after: int = 0, limit: int, whole: bool = False) -> list[dict[str, Any]]:
        """Return those selected with an id above `after`, in id order."""
        mine, page = self._mine(selection), {"after": after, "limit": limit}
        return self._in_transaction(lambda connection: dead.find(connection, self._tables, mine, **page, whole=whole))

    def retry(self, selection: Selection) -> Iterator[int]:
        """Let dead messages be tried again, at once; yield, after the commit of each batch, how many it has changed.

        In an ordered inbox a message waits while another one of its key is being tried, while an earlier one waits, and, if the
        policy of its topic is to block, while an earlier one is dead. One that dies again meanwhile is left alone.
        """
        mine = self._mine(selection)
        return self._in_batches(mine, lambda connection, ids: self._retry(connection, mine, ids))

    def discard(self, selection: Selection) -> Iterator[int]:
        """Delete dead messages for good; yield, after the commit of each batch, how many it has deleted.

        The next of the key goes on, unless something else holds it back.
        """
        mine = self._mine(selection)
        return self._in_batches(mine, lambda connection, ids: self._discard(connection, mine, ids))

    def _retry(self, connection: sa.Connection, selection: Selection, ids: list[int]) -> int:
        inbox = self._inbox
        retried, keys = given_up.retry(connection, self._tables, selection, ids, ordered=inbox.ordered)
        if inbox.ordered and keys:
            given_up.hold_tried(connection, self._tables, inbox.consumer, keys)
            self._unblock(connection, keys)
        return retried

    def _discard(self, connection: sa.Connection, selection: Selection, ids: list[int]) -> int:
        discarded, keys = given_up.discard(connection, self._tables, selection, ids)
        if keys:  # also if the inbox is not ordered any more: what has waited then, waits still
            self._unblock(connection, given_up.held_back(connection, self._tables, self._inbox.consumer, keys))
        return discarded

    def _unblock(self, connection: sa.Connection, keys: Collection[str]) -> None:
        inbox = self._inbox
        for key in sorted(keys):
            failed.unblock(connection, self._tables, inbox.consumer, key, waits_for_dead=inbox.waits_for_dead)

    def _in_batches(self, selection: Selection, change: Callable[[sa.Connection, list[int]], int]) -> Iterator[int]:
        batches = Batches(self._tables, selection, place=self._tables.failed.c.id, change=change, at_once=AT_ONCE)

        def one(connection: sa.Connection) -> int:
            take_turns(connection, self._tables.failed, self._inbox.consumer)
            return batches.take(connection)

        while not batches.over:
            yield self._in_transaction(one)

    def _in_transaction(self, work: Callable[[sa.Connection], R]) -> R:
        found: R = self._run(self._call, work)
        return found

    def _call(self, work: Callable[[sa.Connection], R]) -> R:
        with self._inbox.transaction() as (session, connection):
            bound_waits(session, self._tables, lock_timeout_s=_LOCK_LIMIT_S, idle_s=_IDLE_LIMIT_S)
            return work(connection)

    def _mine(self, selection: Selection) -> Selection:
        return replace(selection, consumer=self._inbox.consumer)
