"""Stopping in two phases: take nothing new, then, when the grace is over, give up what is left."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import threading


class Stopping:
    """Knows whether we were asked to stop, and how much of the grace is left."""

    def __init__(self, event: threading.Event, *, grace_s: float) -> None:
        self._event = event
        self._grace_s = grace_s
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

    def rest(self, timeout_s: float) -> None:
        """Wait for the time also after we were asked to stop, as far as the grace allows."""
        self.wait(timeout_s)
        if self.asked:
            time.sleep(max(0.0, min(timeout_s, self._deadline() - time.monotonic())))

    def _deadline(self) -> float:
        if self._over_at is None:
            self._over_at = time.monotonic() + self._grace_s
        return self._over_at
