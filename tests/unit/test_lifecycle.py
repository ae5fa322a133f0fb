"""Signals set the event, whatever the main thread is doing; a second one ends the process."""

import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

WAITING = {
    "on the event": "stop.wait()",
    "on a socket": "import socket; a, b = socket.socketpair(); a.settimeout(60); exec('try: a.recv(1)\\nexcept TimeoutError: pass')",
    "busy": "while not stop.is_set(): pass",
}


@contextmanager
def process(code: str) -> Iterator["subprocess.Popen[str]"]:
    program = f"from outbox.lifecycle import stop_on_signals\nstop = stop_on_signals()\nprint('ready', flush=True)\n{code}"
    with subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[2]
    ) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "ready\n"
        try:
            yield child
        finally:
            child.kill()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_the_first_signal_sets_the_event(number: signal.Signals) -> None:
    with process("stop.wait(); print('stopping', flush=True)") as child:
        child.send_signal(number)
        assert child.wait(30) == 0
        assert child.stdout is not None
        assert child.stdout.read() == "stopping\n"


@pytest.mark.parametrize("waiting", WAITING)
def test_the_second_signal_ends_the_process_at_once(waiting: str) -> None:
    code = (
        f"import threading; threading.Thread(target=lambda: (stop.wait(), print('set', flush=True))).start()\n{WAITING[waiting]}"
    )
    with process(f"{code}\nthreading.Event().wait()") as child:
        child.send_signal(signal.SIGTERM)
        assert child.stdout is not None
        assert child.stdout.readline() == "set\n"
        child.send_signal(signal.SIGINT)
        assert child.wait(30) == 130
