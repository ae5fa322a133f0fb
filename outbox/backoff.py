"""How long to wait before the next try: exponential, with a ceiling and full jitter."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass

from outbox.errors import ConfigurationError

_MOST_DOUBLINGS = 64


@dataclass(frozen=True, slots=True)
class Backoff:
    """Delays that double from `first_s` up to `ceiling_s` seconds.

    Full jitter draws each delay evenly from zero to that bound, so that many waiting processes do not
    come back together; `floor` keeps the given share of it as a minimum (0.5 waits at least half). Raises `ConfigurationError` for what cannot work.
    """

    first_s: float = 1.0
    ceiling_s: float = 300.0
    floor: float = 0.0

    def __post_init__(self) -> None:
        if not 0 <= self.first_s <= self.ceiling_s < math.inf:
            raise ConfigurationError(
                "the first delay of retries (retry-first, first_s) must not be longer than the longest one (retry-ceiling, "
                f"ceiling_s), and neither less than zero: {self.first_s:g} s > {self.ceiling_s:g} s"
            )
        if not 0 <= self.floor <= 1:
            raise ConfigurationError(f"the floor of a delay is a share of it, from 0 to 1, not {self.floor:g}")

    def bound_s(self, failures: int) -> float:
        """Return the longest delay, in seconds, after so many failures in a row (1 is the first)."""
        doublings = min(max(failures - 1, 0), _MOST_DOUBLINGS)
        return float(min(self.ceiling_s, self.first_s * 2**doublings))

    def total_s(self, failures: int) -> float:
        """Return the longest time, in seconds, that the delays after so many failures in a row take together."""
        growing = min(failures, _MOST_DOUBLINGS)
        rest = failures - growing
        return sum(self.bound_s(failure) for failure in range(1, growing + 1)) + rest * self.bound_s(failures)

    def delay_s(self, failures: int) -> float:
        """Return one drawn delay, in seconds, after so many failures in a row."""
        bound = self.bound_s(failures)
        return bound * random.uniform(self.floor, 1.0)

    def waited_s(self, age_s: float) -> float:
        """Return one drawn delay, in seconds, for what has waited so long already: between half of that and all of it."""
        bound = min(self.ceiling_s, max(self.first_s, age_s))
        return bound * random.uniform(max(0.5, self.floor), 1.0)
