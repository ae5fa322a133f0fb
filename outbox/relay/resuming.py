"""Ends a pause: lets go, in short transactions, what it has kept back.

It makes *every* blocked message of the matching topics deliverable, and so also those that wait for another reason: behind a
dead message of their key, or because another pause matches them too. That cannot reorder a key. Of a key's blocked
messages all hold back the later ones, and only a claim decides what goes out: it reads, in one snapshot and under the lease of
their partition, the pending messages and the first one of each key that holds. A message that was let go while an earlier
one still holds is blocked again there, before anything is published. And none is left behind so: the earlier one, when it
is sent or discarded, finds it behind itself and lets it go, as it does for any other. Nor can what the resume lets go be blocked
by the pause itself again: it begins when every claim that saw the pause has committed.
"""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from outbox.store import pauses
from outbox.store.dialects import limit_statements
from outbox.topics import matches

if TYPE_CHECKING:
    from collections.abc import Iterator

    import sqlalchemy as sa

    from outbox.tables import Tables

BATCH = 500
_LOCK_LIMIT_S = 5.0  # relays wait behind us while we wait for a transaction that hangs
_COUNT_LIMIT_S = 300.0


@dataclass(frozen=True, slots=True)
class Share:
    """The blocked messages of one topic: how many, and the highest id. Those with higher ids came after the pause had ended."""

    topic: str
    number: int
    last: int


class Resume:
    """Ends the pause of one pattern. Killed at any point, a second one takes up where it was; two at once are harmless.

    Call `begin`, then go through `steps`, then call `finish`. Each is short transactions; any may raise `SQLAlchemyError`.
    """

    def __init__(self, engine: sa.Engine, tables: Tables, topics: str) -> None:
        self._engine = engine
        self._tables = tables
        self._topics = topics
        self._shares: list[Share] = []

    def begin(self) -> bool:
        """Let relays ignore the pause from now on, and count what it kept back; return whether there is such a pause."""
        with self._begin(_LOCK_LIMIT_S) as connection:
            pauses.wait_for_claims(connection, self._tables)
            if not pauses.end(connection, self._tables, self._topics):
                return False
        with self._begin(_COUNT_LIMIT_S) as connection:
            self._shares = list(self._find(connection))
        return True

    @property
    def total(self) -> int:
        """How many messages `begin` has found."""
        return sum(share.number for share in self._shares)

    def steps(self) -> Iterator[int]:
        """Let the messages go, topic by topic in id order; yield how many with each transaction."""
        for share in self._shares:
            after = 0
            while ids := self._step(share, after):
                after = ids[-1]
                yield len(ids)

    def finish(self) -> bool:
        """Forget the pause; return false if somebody has paused the pattern again meanwhile, or ended this pause too."""
        with self._begin(_LOCK_LIMIT_S) as connection:
            return pauses.delete(connection, self._tables, self._topics)

    def _find(self, connection: sa.Connection) -> Iterator[Share]:
        topic = ""  # before every other
        while (following := pauses.next_blocked_topic(connection, self._tables, after=topic)) is not None:
            topic = following
            if matches(self._topics, topic):
                yield Share(topic, *pauses.count_blocked(connection, self._tables, topic))

    def _step(self, share: Share, after: int) -> list[int]:
        with self._begin(_LOCK_LIMIT_S) as connection:
            pauses.wait_for_claims(connection, self._tables)  # they move the same rows, in orders of their own
            found = pauses.blocked_ids(connection, self._tables, share.topic, after=after, last=share.last, limit=BATCH)
            if found:
                pauses.unblock(connection, self._tables, found)
            return list(found)

    @contextmanager
    def _begin(self, limit_s: float) -> Iterator[sa.Connection]:
        with self._engine.begin() as connection:
            limit_statements(connection, limit_s)
            yield connection
