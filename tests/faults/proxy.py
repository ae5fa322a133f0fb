"""A network between a client and a server, that can stall, lose what is sent, and break. Faults hit the connections there are.

It can also break whenever a mark passes, as a firewall does over a payload, or a server over a message that it dies of.
"""

import socket
import threading
from contextlib import suppress
from typing import Self
from urllib.parse import urlsplit, urlunsplit


class Proxy:
    """Passes TCP connections on. A connection that comes after a fault is a good one."""

    def __init__(self, url: str, *, breaks_at: bytes | None = None) -> None:
        self._breaks_at = breaks_at
        where = urlsplit(url)
        self._target = (where.hostname, where.port)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = urlunsplit(
            where._replace(netloc=where.netloc.replace(f":{where.port}", f":{self._listener.getsockname()[1]}"))
        )
        self._wires: list[_Wire] = []

    @property
    def connections(self) -> int:
        """How many connections there were so far."""
        return len(self._wires)

    def stall(self) -> None:
        """Pass nothing on, either way, and keep it: for `resume`."""
        for wire in self._wires:
            wire.flowing.clear()

    def resume(self) -> None:
        """Pass on what was held back, even if the client has long gone."""
        for wire in self._wires:
            wire.flowing.set()

    def lose(self) -> None:
        """Be half open: take what is sent, either way, and drop it, as when the other host has lost its power."""
        for wire in self._wires:
            wire.losing.set()

    def cut(self) -> None:
        """Break the connections."""
        for wire in self._wires:
            wire.close()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                near, _ = self._listener.accept()
                try:
                    far = socket.create_connection(self._target)
                except OSError:
                    near.close()
                    continue
                self._wires.append(_Wire(near, far, self._breaks_at))

    def __enter__(self) -> Self:
        self._thread = threading.Thread(target=self._accept)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._thread.join()
        self.resume()
        self.cut()
        for wire in self._wires:
            wire.join()


class _Wire:
    """One connection, both ways."""

    def __init__(self, near: socket.socket, far: socket.socket, breaks_at: bytes | None) -> None:
        self.flowing, self.losing = threading.Event(), threading.Event()
        self.flowing.set()
        self._ends = (near, far)
        self._breaks_at = breaks_at
        self._threads = [threading.Thread(target=self._pass_on, args=ends) for ends in ((near, far), (far, near))]
        for thread in self._threads:
            thread.start()

    def _pass_on(self, source: socket.socket, target: socket.socket) -> None:
        seen = b""
        with suppress(OSError):
            while data := source.recv(65536):
                if self._breaks_at is not None:
                    seen = seen[-len(self._breaks_at) :] + data  # the mark may come in two pieces
                    if self._breaks_at in seen:
                        self.close()
                        break
                self.flowing.wait()
                if not self.losing.is_set():
                    target.sendall(data)
        self.flowing.wait()
        if not self.losing.is_set():
            with suppress(OSError):
                target.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        for end in self._ends:
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def join(self) -> None:
        for thread in self._threads:
            thread.join()
        for end in self._ends:
            end.close()
