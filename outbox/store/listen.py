"""LISTEN on a connection of its own, each of its statements bounded in time by the client: the server may be out of reach."""

from __future__ import annotations

import selectors
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Self

import psycopg

from outbox.errors import ConfigurationError
from outbox.store.engine import driver_arguments
from outbox.wakeaddress import CHANNEL

if TYPE_CHECKING:
    from outbox.waker import Waker

_APPLICATION = "outbox-relay-wake"
ANSWER_S = 5.0


@dataclass(frozen=True, slots=True)
class Server:
    """Where to listen."""

    url: str = field(repr=False)

    @classmethod
    def at(cls, url: str) -> Self:
        """Return the server that a SQLAlchemy URL names. Does not connect. Raises `ConfigurationError` if it cannot work."""
        driver_arguments(url, application_name=_APPLICATION)
        return cls(url)

    def connect(self) -> psycopg.Connection[Any]:
        """Connect; each statement is to be a transaction of its own. Raises `psycopg.Error`."""
        try:
            arguments, named = driver_arguments(self.url, application_name=_APPLICATION)
        except ConfigurationError as error:  # what of it is in a file could be read at the start
            raise psycopg.OperationalError(str(error)) from error
        connection: psycopg.Connection[Any] = psycopg.connect(*arguments, **named, autocommit=True)
        return connection


def notify(server: Server) -> None:
    """Wake all relays that listen, as a producer would, by a connection made for it. Raises `psycopg.Error`."""
    with server.connect() as connection:
        connection.execute(f"NOTIFY {CHANNEL}".encode())


class Channel:
    """A connection that listens for wake-ups; a context manager.

    All methods raise `psycopg.Error` or `OSError` when the connection is lost, also when the server does not answer in
    `answer_s` seconds: libpq's own calls can be waited for with an end, and together with another descriptor.
    """

    def __init__(self, server: Server, *, answer_s: float = ANSWER_S) -> None:
        self._answer_s = answer_s
        self._connection = server.connect()
        self._wire = self._connection.pgconn
        self._wire.nonblocking = 1
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._wire.socket, selectors.EVENT_READ)
        try:
            self._ask(f"LISTEN {CHANNEL}")
        except BaseException:
            self.close()
            raise

    def heard(self, timeout_s: float, *, unless: Waker | None = None) -> bool:
        """Wait for a wake-up; tell whether there was one before the time passed or `unless` was woken."""
        until = time.monotonic() + timeout_s
        while not self._notified():
            left_s = until - time.monotonic()
            if left_s <= 0 or not self._readable(left_s, unless):
                return False
            self._wire.consume_input()
        return True

    def check(self) -> None:
        """Ask the server for a sign of life."""
        self._ask("SELECT 1")

    def close(self) -> None:
        """Close the connection; may be called twice."""
        self._selector.close()
        self._connection.close()

    def _notified(self) -> bool:
        """Tell whether there was a wake-up, and forget all that there were."""
        found = False
        while self._wire.notifies() is not None:
            found = True
        return found

    def _readable(self, timeout_s: float, unless: Waker | None = None) -> bool:
        """Wait until the server has sent something; tell whether it has, before the time passed or `unless` was woken."""
        if unless is None:
            return bool(self._selector.select(timeout_s))
        self._selector.register(unless, selectors.EVENT_READ)
        try:
            ready = [key.fileobj for key, _ in self._selector.select(timeout_s)]
        finally:
            self._selector.unregister(unless)
        return unless not in ready and bool(ready)

    def _ask(self, statement: str) -> None:
        until = time.monotonic() + self._answer_s
        self._wire.send_query(statement.encode())
        while self._wire.flush() or self._wire.is_busy():
            left_s = until - time.monotonic()
            if left_s <= 0 or not self._readable(left_s):
                raise TimeoutError(f"no answer for {self._answer_s:g} s")
            self._wire.consume_input()
        while (result := self._wire.get_result()) is not None:
            if result.error_message:
                raise psycopg.OperationalError(result.error_message.decode(errors="replace").strip())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
