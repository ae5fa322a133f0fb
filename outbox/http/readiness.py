"""Asks a slow question seldom, bounds how long the answer is waited for, and remembers it for a moment."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

KEEP_S = 1.0
LIMIT_S = 2.0


class Readiness:
    """Runs `check`, which raises what is wrong, in a thread of its own, and tells what became of it.

    However many ask at once: one check at a time, and none within `keep_s` seconds of the last one's end. Nobody waits for
    longer than `limit_s`; a check that hangs is not started again.
    """

    def __init__(
        self,
        check: Callable[[], None],
        *,
        limit_s: float = LIMIT_S,
        keep_s: float = KEEP_S,
        seconds: Callable[[], float] = time.monotonic,
    ) -> None:
        self._check = check
        self._limit_s = limit_s
        self._keep_s = keep_s
        self._seconds = seconds
        self._changed = threading.Condition()
        self._began_at: float | None = None  # of the check that runs
        self._fresh_until = float("-inf")
        self._problem: str | None = None

    def problem(self) -> str | None:
        """Return in one line what is wrong; None when all is well."""
        with self._changed:
            if self._began_at is None and self._seconds() >= self._fresh_until:
                self._began_at = self._seconds()
                threading.Thread(target=self._run, name="outbox-readiness", daemon=True).start()
            if self._began_at is not None:
                left_s = self._began_at + self._limit_s - self._seconds()
                self._changed.wait_for(lambda: self._began_at is None, timeout=max(0.0, left_s))
            if self._began_at is not None:
                return f"no answer for {self._seconds() - self._began_at:.1f} s"
            return self._problem

    def _run(self) -> None:
        problem: str | None = None
        try:
            self._check()
        except Exception as error:  # noqa: BLE001 - whatever it is, that is what is wrong
            problem = _one_line(error)
        with self._changed:
            self._problem = problem
            self._began_at = None
            self._fresh_until = self._seconds() + self._keep_s
            self._changed.notify_all()


def _one_line(error: Exception) -> str:
    """Return the first paragraph of an error on one line: a remedy that follows it is for the log."""
    return " ".join(str(error).strip().partition("\n\n")[0].split()) or type(error).__name__
