"""How long to wait before the next try: exponential, with a ceiling and full jitter."""

from __future__ import annotations

import random
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Backoff:
    """Delays that double from `first_s` up to `ceiling_s` seconds.

    Full jitter draws each delay evenly from zero to that bound, so that many waiting processes do not
    come back together; `floor` keeps the given share of it as a minimum (0.5 waits at least half).
    """

    first_s: float = 1.0
    ceiling_s: float = 300.0
    floor: float = 0.0

    def bound_s(self, failures: int) -> float:
        """Return the longest delay, in seconds, after so many failures in a row (1 is the first)."""
        doublings = min(max(failures - 1, 0), 64)
        return float(min(self.ceiling_s, self.first_s * 2**doublings))

    def delay_s(self, failures: int) -> float:
        """Return one drawn delay, in seconds, after so many failures in a row."""
        bound = self.bound_s(failures)
        return bound * random.uniform(self.floor, 1.0)
