"""Says that something is away, without filling the log."""

from __future__ import annotations

from time import monotonic
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import logging


class Outage:
    """Logs the first failure of a row at once, further ones at most every `every_s` seconds, and the recovery once."""

    def __init__(self, log: logging.Logger, what: str, *, every_s: float = 30.0) -> None:
        self._log = log
        self._what = what
        self._every_s = every_s
        self._logged_at = 0.0
        self.failures = 0
        """Failures since it last worked."""

    def failed(self, error: BaseException) -> None:
        """Count a failure."""
        self.failures += 1
        now = monotonic()
        if self.failures == 1 or now - self._logged_at >= self._every_s:
            self._logged_at = now
            self._log.warning(
                "%s is unavailable; trying again until it is back",
                self._what,
                extra={"error": _first_line(error), "failures": self.failures},
            )

    def recovered(self) -> None:
        """Note that it works."""
        if self.failures:
            self._log.info("%s is back", self._what, extra={"failures": self.failures})
            self.failures = 0


def _first_line(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0] or type(error).__name__
