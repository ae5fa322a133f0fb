"""A server that is away: how long to wait for it, and how seldom to speak of it."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING

from outbox.backoff import Backoff

if TYPE_CHECKING:
    import logging
    from collections.abc import Callable

RECONNECT = Backoff(first_s=0.1, ceiling_s=5.0, floor=0.5)
"""Pauses between tries to reach a server, with jitter so that processes do not come back all together."""

_SPEAK_EVERY_S = 30.0


class Outage:
    """Counts failures in a row with one server, gives the next pause, and logs the first, a few, and the end. Thread safe.

    `on_change` is called with the first error, and with None at the end, in the thread that has met it; it must not raise.
    """

    def __init__(
        self,
        log: logging.Logger,
        server: str,
        backoff: Backoff = RECONNECT,
        *,
        on_change: Callable[[BaseException | None], object] = lambda _error: None,
    ) -> None:
        self._log = log
        self._server = server
        self._backoff = backoff
        self._on_change = on_change
        self._lock = threading.Lock()
        self._failures = 0
        self._began_at = 0.0
        self._spoke_at = -_SPEAK_EVERY_S
        self._said = False

    def pause_s(self, error: BaseException) -> float:
        """Note one more failure; return how many seconds to wait before the next try."""
        with self._lock:
            pause_s = self._failed(error, time.monotonic())
            if self._failures == 1:
                self._on_change(error)
        return pause_s

    def over(self) -> None:
        """Note that the server has answered."""
        if not self._failures:
            return
        with self._lock:
            if not self._failures:  # another thread was first
                return
            if self._said:
                lasted = round(time.monotonic() - self._began_at, 1)
                self._log.info("server back", extra={"server": self._server, "tries": self._failures, "away_s": lasted})
            self._failures = 0
            self._said = False
            self._on_change(None)

    def _failed(self, error: BaseException, now: float) -> float:
        self._failures += 1
        if self._failures == 1:
            self._began_at = now
        if now - self._spoke_at >= _SPEAK_EVERY_S:  # also from one outage to the next: a server may come and go
            self._spoke_at = now
            self._said = True
            extra = {"server": self._server, "tries": self._failures, "error": _first_line(error)}
            self._log.warning("server away, trying again", extra=extra)
        return self._backoff.delay_s(self._failures)


def _first_line(error: BaseException) -> str:
    return str(getattr(error, "orig", None) or error).strip().partition("\n")[0] or type(error).__name__
