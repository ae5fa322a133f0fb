"""Logs what telemetry tells about messages, sparingly when nothing of what is to be published can be."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from outbox import clock
from outbox.mention import naming
from outbox.states import State
from outbox.telemetry import (
    BatchFenced,
    BatchSettled,
    MessageDied,
    MessageRetried,
    PublishFailed,
    PublishGivenUp,
    Telemetry,
    TelemetryEvent,
)
from outbox.telemetry.bus import Choosing

if TYPE_CHECKING:
    from collections.abc import Callable

relay = logging.getLogger("outbox.relay")
inbox = logging.getLogger("outbox.inbox")

MOST = 20
WITHIN_S = 20.0


class Allowance:
    """So many lines within so many seconds, and how many were left out since the last one. For one thread."""

    def __init__(self, *, most: int = MOST, within_s: float = WITHIN_S, seconds: Callable[[], float] = clock.seconds) -> None:
        self._most = most
        self._within_s = within_s
        self._seconds = seconds
        self._began_at = float("-inf")
        self._said = self._left_out = 0

    def take(self) -> dict[str, int] | None:
        """Return what to add to a line; None: say nothing."""
        now = self._seconds()
        if now - self._began_at >= self._within_s:
            self._began_at, self._said = now, 0
        if self._said >= self._most:
            self._left_out += 1
            return None
        self._said += 1
        left_out, self._left_out = self._left_out, 0
        return {"left_out": left_out} if left_out else {}


class EventLog(Choosing):
    """A subscriber that logs.

    Of a relay's failures twenty lines within twenty seconds are said, for batches as for dead messages; the next one says how
    many were left out. At DEBUG each failure is a line.
    """

    def __init__(self) -> None:
        self._failures, self._deaths = Allowance(), Allowance()
        self.chosen = {
            BatchSettled: self._settled,
            BatchFenced: self._fenced,
            PublishFailed: self._failed,
            PublishGivenUp: self._given_up,
            MessageRetried: self._retried,
            MessageDied: self._died,
        }

    def _settled(self, event: BatchSettled) -> None:
        relay.debug("settled", extra={"sent": event.states.get(State.SENT, 0)})
        first = event.first_failure
        if first is not None and (more := self._failures.take()) is not None:
            counts = {"will_retry": event.states.get(State.SCHEDULED, 0), "dead": event.states.get(State.DEAD, 0)}
            relay.warning("messages not published", extra={**counts, "error": first.reason, **naming(first), **more})

    def _fenced(self, event: BatchFenced) -> None:
        relay.warning("fenced: another relay has the lease, outcomes dropped", extra={"messages": event.messages})

    def _failed(self, event: PublishFailed) -> None:
        extra = {"attempts": event.attempts, "retry_in_s": round(event.retry_in_s, 1), "error": event.reason}
        relay.debug("message not published; tried again", extra={**naming(event), **extra})

    def _given_up(self, event: PublishGivenUp) -> None:
        more = self._deaths.take()
        if more is not None:
            extra = {"attempts": event.attempts, "error": event.reason}
            relay.error("message given up", extra={**naming(event), **extra, **more})

    def _retried(self, event: MessageRetried) -> None:
        extra = {"attempts": event.attempts, "retry_in_s": round(event.retry_in_s, 1), "error": event.reason}
        inbox.warning("handling failed; rolled back", extra={**naming(event), **extra}, exc_info=_traceback(event))

    def _died(self, event: MessageDied) -> None:
        extra = {"attempts": event.attempts, "error": event.reason}
        inbox.error("message given up", extra={**naming(event), **extra}, exc_info=_traceback(event))


def _traceback(event: MessageRetried | MessageDied) -> BaseException | None:
    return None if event.explained else event.error


def logged(*subscribers: Callable[[TelemetryEvent], object]) -> Telemetry:
    """Return telemetry that is logged, and that these others get too."""
    return Telemetry(EventLog(), *subscribers)
