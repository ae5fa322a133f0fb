"""The one place where a relay waits: for the time, for the stop, or for a wake-up.

Stopping is in two phases: take nothing new, then, when the grace is over, give up what is left.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import threading

    from outbox.relay.wakeups import WakeUps


class Stopping:
    """Knows whether we were asked to stop, how much of the grace is left, and what ends a wait before its time."""

    def __init__(self, event: threading.Event, *, grace_s: float, wake_ups: WakeUps | None = None) -> None:
        self._event = event
        self._grace_s = grace_s
        self._wake_ups = wake_ups
        self._over_at: float | None = None

    @property
    def asked(self) -> bool:
        """Somebody asked us to stop."""
        return self._event.is_set()

    @property
    def grace_over(self) -> bool:
        """We were asked to stop, and the time to finish has passed."""
        return self.asked and time.monotonic() >= self._deadline()

    def wait(self, timeout_s: float) -> None:
        """Wait for the time, or until we are asked to stop."""
        self._event.wait(timeout_s)

    @property
    def hears(self) -> bool:
        """Wake-ups are on."""
        return self._wake_ups is not None

    def idle(self, timeout_s: float) -> bool:
        """Wait for the time, until we are asked to stop, or until we are woken; tell whether to look now."""
        if self._wake_ups is None:
            self.wait(timeout_s)
            return False
        return self._wake_ups.wait(timeout_s)

    def about_to_look(self) -> None:
        """Forget the wake-ups so far, just before looking for what they announce: one that comes later ends the next wait."""
        if self._wake_ups is not None:
            self._wake_ups.clear()

    def found(self) -> None:
        """Note that there was something to do."""
        if self._wake_ups is not None:
            self._wake_ups.fruitful()

    def rest(self, timeout_s: float) -> None:
        """Wait for the time also after we were asked to stop, as far as the grace allows."""
        self.wait(timeout_s)
        if self.asked:
            time.sleep(max(0.0, min(timeout_s, self._deadline() - time.monotonic())))

    def _deadline(self) -> float:
        if self._over_at is None:
            self._over_at = time.monotonic() + self._grace_s
        return self._over_at
