"""`python -m tests.faults.stopped POINT NTH -- MODULE ARGS...`: a program that stops itself at the nth passing of a point.

It stops with SIGSTOP, in the middle of a step: what comes next (a kill, a long pause, a SIGTERM) is for the test to decide.
"""

import os
import queue
import runpy
import signal
import sys
import threading
from collections.abc import Callable

from outbox import points
from outbox.points import Point
from tests.faults.processes import Program


def stopping_at(point: Point, nth: int, program: Program) -> Program:
    """Let a program, not yet started, stop itself at the nth passing of a point."""
    python, dash_m, *rest = program._command
    program._command = [python, dash_m, __name__, point, str(nth), "--", *rest]
    return program


def wait_until_stopped(program: Program, *, timeout_s: float = 60) -> None:
    """Wait for the kernel to say that the program has stopped itself."""
    pid = program.process.pid
    said: queue.SimpleQueue[os.waitid_result | None] = queue.SimpleQueue()
    how = os.WSTOPPED | os.WEXITED | os.WNOWAIT  # it stays to be waited for by its Popen
    threading.Thread(target=lambda: said.put(os.waitid(os.P_PID, pid, how)), daemon=True).start()
    try:
        result = said.get(timeout=timeout_s)
    except queue.Empty:
        raise TimeoutError(f"{program.name} did not come to the point:\n{program.log}") from None
    if result is None or result.si_code != os.CLD_STOPPED:
        raise RuntimeError(f"{program.name} ended before the point:\n{program.log}")


def wake(program: Program) -> None:
    """Let a stopped program go on."""
    program.process.send_signal(signal.SIGCONT)


def _stop_at(point: Point, nth: int) -> Callable[[Point], None]:
    passed = 0

    def hook(reached: Point) -> None:
        nonlocal passed
        if reached is not point:
            return
        passed += 1
        if passed == nth:
            # Stops all threads, this one first: sent to the process, it would let this one run on for a moment.
            signal.pthread_kill(threading.get_ident(), signal.SIGSTOP)

    return hook


def main() -> None:
    """Set the hook, then run the module as `python -m` would."""
    point, nth, _, module, *arguments = sys.argv[1:]
    points.hook = _stop_at(Point(point), int(nth))
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
