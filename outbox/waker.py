"""Lets one thread wake another that waits on a descriptor: for a server, a datagram, or the time to pass."""

from __future__ import annotations

import socket
from contextlib import suppress
from typing import Self


class Waker:
    """A socket that becomes readable when somebody calls `wake`. A context manager; `wake` may be called anywhere."""

    def __init__(self) -> None:
        self._reader, self._writer = socket.socketpair()
        self._reader.settimeout(0)
        self._writer.settimeout(0)

    def fileno(self) -> int:
        """Return the descriptor to wait on."""
        return self._reader.fileno()

    def wake(self) -> None:
        """Make the socket readable. Never blocks: a full socket is readable already, a closed one wakes nobody."""
        with suppress(OSError):
            self._writer.send(b"\0")

    def clear(self) -> None:
        """Forget all wakes so far."""
        with suppress(BlockingIOError):
            while True:
                self._reader.recv(4096)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._reader.close()
        self._writer.close()
