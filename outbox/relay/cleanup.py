"""When a relay cleans up: a little at a time, between its turns, so that messages never wait for it long."""

from __future__ import annotations

import logging
import random
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from sqlalchemy.exc import SQLAlchemyError

from outbox.points import Point, reached
from outbox.store import retention
from outbox.store.dialects import limit_statements
from outbox.telemetry import CleanedUp, Telemetry

if TYPE_CHECKING:
    from collections.abc import Callable
    from datetime import datetime

    import sqlalchemy as sa

    from outbox.tables import Tables

log = logging.getLogger("outbox.relay")

BATCH = 5000
RELAY_RETENTION_S = 86_400.0
LOOK_EVERY_S = 60.0
_SWEEP_EVERY_S = 3600.0
_SPEAK_EVERY_S = 60.0
_STATEMENT_LIMIT_S = 10.0


@dataclass(slots=True)
class _Chore:
    """One kind of rows to delete: what they are called in the log, how, when they are next due, and where the last batch ended."""

    name: str
    expire: Callable[..., retention.Deleted]
    older_than_s: float
    due_at: float
    swept_at: float
    since: datetime | None = None


class Cleanup:
    """Deletes what has been kept long enough, of all relays by one at a time: whoever finds another at it leaves.

    Every call of `turn` deletes one batch of one kind at most. After a full batch the next call goes on; after one that was
    not full, that found another relay at work, or that failed, nothing is looked at for a minute.
    """

    def __init__(
        self,
        engine: sa.Engine,
        tables: Tables,
        *,
        retention_s: float | None,
        inbox_retention_s: float | None,
        clock: Callable[[], float] = time.monotonic,
        telemetry: Telemetry | None = None,
    ) -> None:
        self._engine = engine
        self._telemetry = telemetry or Telemetry()
        self._tables = tables
        self._clock = clock
        # Rows that are marked as sent are cleaned up only by relays that know for how long they are to be kept.
        kinds = (
            ("messages", retention.expire_sent, retention_s),
            ("processed", retention.expire_processed, inbox_retention_s),
            ("relays", retention.expire_relays, RELAY_RETENTION_S),
        )
        now = clock()
        self._chores = [_Chore(name, expire, age_s, now, now) for name, expire, age_s in kinds if age_s is not None]
        self._deleted = {chore.name: 0 for chore in self._chores}
        self._spoke_at = now - _SPEAK_EVERY_S

    def turn(self) -> None:
        """Delete one batch if it is time to. Never raises for the database's sake: what failed is tried again later."""
        now = self._clock()
        chore = min(self._chores, key=lambda chore: chore.due_at)
        if chore.due_at <= now:
            self._work(chore, now)
        self._speak(now)

    def _work(self, chore: _Chore, now: float) -> None:
        if now - chore.swept_at >= _SWEEP_EVERY_S:  # once more from the start, for what was passed over as locked
            chore.since, chore.swept_at = None, now
        try:
            deleted = self._delete(chore)
        except SQLAlchemyError as error:
            log.warning("clean-up failed", extra={"error": str(getattr(error, "orig", None) or error).partition("\n")[0]})
            for each in self._chores:
                each.due_at = _later(now)
            return
        if deleted is None or deleted.count < BATCH:
            chore.due_at = _later(now)
        else:
            chore.due_at = now
        if deleted is not None and deleted.last is not None:
            chore.since = deleted.last
            self._deleted[chore.name] += deleted.count
            self._telemetry.emit(CleanedUp(chore.name, deleted.count))

    def _delete(self, chore: _Chore) -> retention.Deleted | None:
        """Delete one batch in a transaction of its own; `None` if another relay is at it."""
        with self._engine.begin() as connection:
            limit_statements(connection, _STATEMENT_LIMIT_S)
            if not retention.try_lock(connection, self._tables):
                return None
            deleted = chore.expire(connection, self._tables, older_than_s=chore.older_than_s, since=chore.since, most=BATCH)
            reached(Point.DURING_CLEANUP)
            return deleted

    def _speak(self, now: float) -> None:
        if any(self._deleted.values()) and now - self._spoke_at >= _SPEAK_EVERY_S:
            log.info("cleaned up", extra=self._deleted)
            self._deleted = dict.fromkeys(self._deleted, 0)
            self._spoke_at = now


def _later(now: float) -> float:
    """Return when to look again: with jitter, so that relays that were started together do not all look together."""
    return now + LOOK_EVERY_S * random.uniform(1.0, 1.25)
