"""`python -m tests.faults.shifted SECONDS -- MODULE ARGS...`: a program on a host whose clock is wrong by so many seconds."""

import datetime as dt
import runpy
import sys
import time

from tests.faults.processes import Program


def shifted(seconds: int, program: Program) -> Program:
    """Let a program, not yet started, see a wrong clock."""
    python, dash_m, *rest = program._command
    program._command = [python, dash_m, __name__, str(seconds), "--", *rest]
    return program


def shift(seconds: int) -> None:
    """Shift every clock of the calendar in this process; those that measure durations are as they were."""
    now, now_ns, right = time.time, time.time_ns, dt.datetime
    by = dt.timedelta(seconds=seconds)

    class Shifted(dt.datetime):
        @classmethod
        def now(cls, tz: dt.tzinfo | None = None) -> "Shifted":
            return cls.fromtimestamp(right.now(tz).timestamp() + seconds, tz)

        @classmethod
        def utcnow(cls) -> "Shifted":
            moment = right.now(dt.UTC).replace(tzinfo=None) + by
            return cls(*moment.timetuple()[:6])

    time.time = lambda: now() + seconds
    time.time_ns = lambda: now_ns() + seconds * 10**9
    dt.datetime = Shifted  # type: ignore[misc]


def main() -> None:
    """Shift the clock, then run the module as `python -m` would."""
    seconds, _, module, *arguments = sys.argv[1:]
    shift(int(seconds))
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
