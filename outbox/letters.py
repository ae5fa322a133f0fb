"""Dead letters, whosever they are: what commands ask of them, and the one way to work through many, batch by batch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

from outbox.store import dead

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from datetime import datetime

    import sqlalchemy as sa

    from outbox.store.dead import Chosen, Selection
    from outbox.tables import Tables

AT_ONCE = 500


class Letters(Protocol):
    """The dead letters of the relay, or of one consumer. Each method works in transactions of its own."""

    def clock(self) -> datetime:
        """Return the database's clock."""

    def count(self, selection: Selection) -> int:
        """Return how many are selected."""

    def find(self, selection: Selection, *, after: int = 0, limit: int, whole: bool = False) -> list[dict[str, Any]]:
        """Return those selected with an id above `after`, in id order; only if `whole` with payload, headers and failures."""

    def retry(self, selection: Selection) -> Iterator[int]:
        """Give them another chance; yield after the commit of each batch how many it has changed."""

    def discard(self, selection: Selection) -> Iterator[int]:
        """Delete them for good; yield after the commit of each batch how many it has deleted."""


class Batches:
    """One pass over the dead letters that are selected, in id order; each is changed once, even if it dies again meanwhile.

    `place` is the primary key of the rows that have to be locked before, which `Chosen.place` says, and `change` changes letters
    by their ids when these are locked, and returns how many it has.
    """

    def __init__(
        self,
        tables: Tables,
        selection: Selection,
        *,
        place: sa.ColumnElement[int],
        change: Callable[[sa.Connection, list[int]], int],
        at_once: int = AT_ONCE,
    ) -> None:
        self._tables = tables
        self._selection = selection
        self._place = place
        self._change = change
        self._at_once = at_once
        self._after = 0
        self._all_chosen = False
        self._left: list[Chosen] = []

    @property
    def over(self) -> bool:
        """Tell whether nothing is left."""
        return self._all_chosen and not self._left

    def take(self, connection: sa.Connection) -> int:
        """Change one batch in the transaction of the connection; return how many letters that were. After an error: no further."""
        if not self._left:
            self._left = dead.choose(connection, self._tables, self._selection, after=self._after, limit=self._at_once)
            self._all_chosen = len(self._left) < self._at_once
            self._after = self._left[-1].id if self._left else self._after
        ids = self._lock(connection)
        return self._change(connection, ids) if ids else 0

    def _lock(self, connection: sa.Connection) -> list[int]:
        """Lock what can be locked without a deadlock; return the ids there, and leave the others for the next time."""
        places = {each.place for each in self._left}
        if not places:
            return []
        held = dead.lock_free(connection, self._place, places) or dead.lock_one(connection, self._place, min(places))
        chosen, self._left = self._left, [each for each in self._left if each.place not in held]
        return [each.id for each in chosen if each.place in held]
