"""One worker's hold on one message, from the lease to the result."""

from __future__ import annotations

import logging
from contextlib import contextmanager
from enum import Enum, auto
from typing import TYPE_CHECKING, Any

from outbox import clock, mention
from outbox.errors import NoTransaction
from outbox.inbox.errors import LeaseLost
from outbox.inbox.heartbeat import beating
from outbox.inbox.results import storable
from outbox.points import Point, reached

if TYPE_CHECKING:
    from collections.abc import Iterator

    import sqlalchemy as sa
    from sqlalchemy.orm import Session

    from outbox.inbox.lease_record import Acquired, LeaseRecord

log = logging.getLogger("outbox.inbox")

_TAKEN = "another worker has taken over the message; its lease had run out here. Undo nothing, write nothing down"
_EXPIRED = "the lease has run out by this worker's own clock: another one may be at work on the message. Start nothing more"
_NOT_COMMITTED = (
    "complete(session=...) was called in a transaction that was not committed when the block of the lease ended; commit it inside"
)


class _Completed(Enum):
    NO = auto()
    IN_A_SESSION = auto()  # of the caller, who may still roll back
    YES = auto()


class Hold:
    """What a worker knows of its lease, and what it may still write. `first` is False for a message that is done already.

    `leased_at` is the worker's own clock *before* the lease was taken, so that the lease can only be longer than we
    think. The heartbeat calls `renew` from its own thread or task.
    """

    def __init__(self, record: LeaseRecord, acquired: Acquired, *, leased_at: float, time_limit_s: float) -> None:
        self.record = record
        self.first = acquired.token is not None
        self.token = acquired.token or 0
        self.result = acquired.result
        self._time_limit_s = time_limit_s
        self._until = leased_at + record.lease_s
        self._progress_at = leased_at
        self._stuck = False
        self._mentioned = mention.current()  # the heartbeat logs outside of the handler's context
        self._completed = _Completed.NO
        self._over = None if self.first else "the message is done already; there is no lease on it"

    @property
    def extra(self) -> dict[str, Any]:
        """What every record in the log about this hold carries."""
        return {**self._mentioned, "consumer": self.record.consumer, "message_id": self.record.message_id, "token": self.token}

    def progress(self) -> None:
        """Note that the handler goes on. Raises `LeaseLost` when the lease is gone, or may be by now."""
        self._refuse_when_over()
        now = clock.seconds()
        if now >= self._until:
            raise LeaseLost(_EXPIRED)
        self._progress_at, self._stuck = now, False

    def renew(self) -> bool:
        """Prolong the lease while the handler makes progress; return False when there is nothing left to prolong."""
        now = clock.seconds()
        if self._has_completed() or self._hangs(now):
            return True
        if self.record.renew(self.token):
            self._until = now + self.record.lease_s
            return True
        # Unless it was done by ourselves meanwhile, perhaps by a COMMIT whose outcome we have not heard.
        if not self._has_completed() and not self.record.is_completed(self.token):
            self._over = _TAKEN
            log.warning("lease lost; another worker has taken over", extra=self.extra)
        return False

    def complete(self, result: object = None, *, target: Session | sa.Connection | None = None) -> None:
        """Write the result, in the caller's transaction or in one of our own. Raises `LeaseLost` and `InvalidResult`."""
        self._refuse_when_over()
        stored = storable(result)
        reached(Point.BEFORE_COMPLETE)
        before, how = self._completed, _Completed.YES if target is None else _Completed.IN_A_SESSION
        self._completed = how  # first, so that the heartbeat does not take a message that is done for one that is lost
        done = False
        try:
            done = self._write(stored, target)
        finally:
            self._completed = how if done else before
        if not done:
            self._over = _TAKEN
            raise LeaseLost(_TAKEN)

    def returned(self, result: object) -> None:
        """Complete with what the handler has returned, if it has not done so itself."""
        if self._completed is _Completed.NO:
            self.complete(result)
        elif self._completed is _Completed.IN_A_SESSION and not self.record.is_completed(self.token):
            raise NoTransaction(_NOT_COMMITTED)

    def release(self) -> None:
        """Let the next delivery have the message at once. Does not raise: otherwise it gets it when the lease runs out."""
        if self._completed is _Completed.YES:
            return
        try:
            self.record.release(self.token)
        except Exception:  # it would hide why the block has ended
            log.warning("lease not given back; it runs out by itself", extra=self.extra, exc_info=True)

    def end(self) -> None:
        """Refuse everything from now on: whoever still has the lease in hand has left its block, or was given up."""
        self._over = self._over or "the block of the lease has ended"

    def _write(self, stored: Any, target: Session | sa.Connection | None) -> bool:
        if target is None:
            return self.record.complete(self.token, stored)
        return self.record.complete_in(target, self.token, stored)

    def _has_completed(self) -> bool:
        return self._completed is not _Completed.NO

    def _refuse_when_over(self) -> None:
        if self._over is not None:
            raise LeaseLost(self._over)

    def _hangs(self, now: float) -> bool:
        hangs = now - self._progress_at > self._time_limit_s
        if hangs and not self._stuck:
            extra = {**self.extra, "time_limit_s": self._time_limit_s}
            log.warning("no progress within the time limit; the lease is left to run out", extra=extra)
        self._stuck = hangs
        return hangs


@contextmanager
def holding(record: LeaseRecord, *, time_limit_s: float, is_async: bool) -> Iterator[Hold]:
    """Take the lease and keep it for the block; at its end complete the message, or release it after an exception.

    For an async inbox both ends are to be run in a greenlet. Raises `Busy` when another worker holds the lease.
    """
    leased_at = clock.seconds()
    hold = Hold(record, record.acquire(), leased_at=leased_at, time_limit_s=time_limit_s)
    if not hold.first:
        yield hold
        return
    try:
        reached(Point.AFTER_LEASE)
        with beating(hold.renew, every_s=record.lease_s / 3, is_async=is_async, extra=hold.extra):
            yield hold
        hold.returned(None)
    except BaseException:
        hold.release()
        raise
    finally:
        hold.end()
