"""How a process is told to stop."""

from __future__ import annotations

import logging
import os
import signal
import socket
import threading

log = logging.getLogger("outbox")

KILLED = 130
"""The exit code after a second signal."""


def stop_on_signals() -> threading.Event:
    """Return an event that SIGTERM or SIGINT sets; a second one of either ends the process at once with code 130.

    Call it once, in the main thread. The signals are read by a thread of their own, from the interpreter's wake-up
    descriptor. So the event is set whatever the main thread is doing, also while it holds the event's own lock (a
    handler that ran in the main thread could wait for itself there) or is stuck in a system call. Not for a
    process whose main thread runs an asyncio loop, which needs that descriptor.
    """
    stop = threading.Event()
    reader, writer = socket.socketpair()
    writer.settimeout(0)  # as set_wakeup_fd asks for
    signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda _number, _frame: None)
    # The thread keeps both ends of the pair open for as long as it runs.
    threading.Thread(target=_watch, args=(reader, writer, stop), name="outbox-signals", daemon=True).start()
    return stop


def _watch(reader: socket.socket, _writer: socket.socket, stop: threading.Event) -> None:
    while True:
        for number in reader.recv(64):
            if number not in (signal.SIGTERM, signal.SIGINT):
                continue
            if stop.is_set():
                logging.shutdown()
                os._exit(KILLED)
            stop.set()  # first: a log that nobody reads may block
            log.info("stopping", extra={"signal": signal.Signals(number).name})
