"""Tells systemd how the process is (sd_notify): at work, alive, stopping."""

from __future__ import annotations

import os
import socket
import threading
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

    from outbox.vitals import Vitals


@contextmanager
def notifying(vitals: Vitals, stop: threading.Event) -> Iterator[None]:
    """Send READY=1 when the loop begins, WATCHDOG=1 only while it gets on, and STOPPING=1 when `stop` is set.

    Does nothing where systemd has not asked for it (NOTIFY_SOCKET). Sets `stop` when the block ends.
    """
    path = os.environ.get("NOTIFY_SOCKET")
    if not path:
        yield
        return
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as to:
        where = "\0" + path[1:] if path.startswith("@") else path
        thread = threading.Thread(target=_notify, args=(to, where, vitals, stop), name="outbox-systemd", daemon=True)
        thread.start()
        try:
            yield
        finally:
            stop.set()
            thread.join()


def _notify(to: socket.socket, where: str, vitals: Vitals, stop: threading.Event) -> None:
    def say(what: bytes) -> None:
        with suppress(OSError):
            to.sendto(what, socket.MSG_DONTWAIT, where)

    while not vitals.at_work.is_set() and not stop.wait(0.1):
        pass
    if not stop.is_set():
        say(b"READY=1")
    while not stop.wait(_watchdog_s()):
        if vitals.hung() is None:
            say(b"WATCHDOG=1")
    say(b"STOPPING=1")


def _watchdog_s() -> float | None:
    """Return how often systemd wants to hear from this process, with a margin; None: not at all."""
    asked = os.environ.get("WATCHDOG_USEC", "") if os.environ.get("WATCHDOG_PID", str(os.getpid())) == str(os.getpid()) else ""
    return int(asked) / 2_000_000 if asked.isdigit() and int(asked) else None
