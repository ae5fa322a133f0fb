"""Where datagrams that wake a relay arrive: a UDP port or a Unix socket of its own."""

from __future__ import annotations

import fcntl
import os
import socket
import stat
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Self

from outbox.errors import ConfigurationError
from outbox.wakeaddress import Udp, Unix

_MOST_AT_ONCE = 1000
_ANYBODY = 0o666


class Datagrams:
    """Becomes readable when a datagram has come, from whomever and whatever is in it. A context manager.

    Raises `ConfigurationError` when it cannot have the address: somebody else has it, above all another relay.
    """

    def __init__(self, address: Udp | Unix) -> None:
        self._address = address
        self._exit = ExitStack()

    def fileno(self) -> int:
        """Return the descriptor to wait on."""
        return self._socket.fileno()

    def clear(self) -> None:
        """Forget what has come so far. Of a flood some may be left, which then wake once more."""
        with suppress(OSError):
            for _ in range(_MOST_AT_ONCE):
                self._socket.recv(1)

    def __enter__(self) -> Self:
        try:
            with ExitStack() as exit_:
                self._open(exit_)
                self._exit = exit_.pop_all()
        except OSError as error:
            raise ConfigurationError(
                f"wake: cannot listen on {self._address}: {error.strerror or error}; each relay needs an address of its own"
            ) from error
        return self

    def __exit__(self, *_: object) -> None:
        self._exit.close()

    def _open(self, exit_: ExitStack) -> None:
        if isinstance(self._address, Udp):
            family, where = self._address.resolve()
            self._socket = exit_.enter_context(_datagram_socket(family))
            self._socket.bind(where)
        else:
            path = Path(self._address.path)
            exit_.enter_context(_locked(path))
            _clear_away(path)
            self._socket = exit_.enter_context(_datagram_socket(socket.AF_UNIX))
            self._socket.bind(str(path))
            exit_.callback(path.unlink, missing_ok=True)
            # Who may enter the folder may wake the relay, which is all that a datagram does.
            path.chmod(_ANYBODY)


def _datagram_socket(family: socket.AddressFamily) -> socket.socket:
    made = socket.socket(family, socket.SOCK_DGRAM)
    made.setblocking(False)
    return made


class _locked:  # noqa: N801 - used as a function is
    """Keeps a path for this process, until its end, however it comes: a socket's own file outlives a killed process.

    By a lock on a file beside it, which is never removed: two that start at once cannot both find the other's leftover.
    """

    def __init__(self, path: Path) -> None:
        self._path = path.with_name(path.name + ".lock")

    def __enter__(self) -> None:
        self._file = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            os.close(self._file)
            raise OSError(error.errno, "another relay has it") from error

    def __exit__(self, *_: object) -> None:
        os.close(self._file)


def _clear_away(path: Path) -> None:
    """Remove the socket that a killed relay has left there. Raises `OSError` if something else is there, or is alive."""
    try:
        mode = path.lstat().st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(mode):
        raise FileExistsError(None, "there is a file that is no socket")
    with _datagram_socket(socket.AF_UNIX) as caller:
        try:
            caller.connect(str(path))
        except ConnectionRefusedError:
            path.unlink()
        else:
            raise FileExistsError(None, "another program has it")
