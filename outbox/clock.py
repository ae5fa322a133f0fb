"""A process's own clock, for leases and for what hangs."""

from __future__ import annotations

import time


def seconds() -> float:
    """Return seconds on a clock that never steps, and that runs on while the machine is suspended where it can."""
    if hasattr(time, "CLOCK_BOOTTIME"):
        return time.clock_gettime(time.CLOCK_BOOTTIME)
    return time.monotonic()
