"""Hears wake-ups by LISTEN, in a thread of its own: whatever becomes of its connection, the relay itself goes on polling."""

from __future__ import annotations

import logging
import threading
from typing import Self

import psycopg

from outbox.outage import Outage
from outbox.store import listen
from outbox.waker import Waker

log = logging.getLogger("outbox.relay")

CHECK_EVERY_S = 10.0
_ECHO_S = 5.0
_GOODBYE_S = 1.0


class Listening:
    """Becomes readable when a producer has notified. A context manager.

    Guaranteed: nothing that happens to its connection gets out of here. One that is lost is made again, with growing pauses;
    one that dies in silence is noticed within 15 seconds, since the server is asked for a sign of life every ten. Each time
    that it listens anew it wakes the relay, for what was committed meanwhile. Not guaranteed: that a wake-up arrives.

    Raises `ConfigurationError` for a URL that cannot work, or is not one of PostgreSQL.
    """

    def __init__(self, url: str, *, check_every_s: float = CHECK_EVERY_S, answer_s: float = listen.ANSWER_S) -> None:
        self._server = listen.Server.at(url)
        self._check_every_s = check_every_s
        self._answer_s = answer_s
        self._outage = Outage(log, "wake-up by LISTEN")
        self._stopping = threading.Event()
        self._echoed = False

    def fileno(self) -> int:
        """Return the descriptor to wait on."""
        return self._waker.fileno()

    def clear(self) -> None:
        """Forget all wake-ups so far."""
        self._waker.clear()

    def _run(self) -> None:
        while not self._stopping.is_set():
            try:
                with listen.Channel(self._server, answer_s=self._answer_s) as channel:
                    self._outage.over()
                    self._waker.wake()
                    self._serve(channel)
            except (psycopg.Error, OSError) as error:
                self._stopping.wait(self._outage.pause_s(error))

    def _serve(self, channel: listen.Channel) -> None:
        if not self._echoed:
            self._echo(channel)
        while not self._stopping.is_set():
            if channel.heard(self._check_every_s, unless=self._ended):
                self._waker.wake()
            elif not self._stopping.is_set():
                channel.check()

    def _echo(self, channel: listen.Channel) -> None:
        """Find out, once, whether a wake-up comes through: a pooler may take the LISTEN, and pass on nothing."""
        listen.notify(self._server)
        if channel.heard(_ECHO_S, unless=self._ended):
            self._waker.wake()
        elif not self._stopping.is_set():
            log.warning(
                "no wake-up comes through by LISTEN, polling only; "
                "is there a transaction pooler in between? give a direct URL as wake-database-url"
            )
        self._echoed = True

    def __enter__(self) -> Self:
        self._waker, self._ended = Waker(), Waker()
        self._thread = threading.Thread(target=self._run, name="outbox-listen", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopping.set()
        self._ended.wake()
        self._thread.join(_GOODBYE_S)
        if not self._thread.is_alive():  # or it is waiting for a server that is out of reach, and ends with the process
            for waker in (self._waker, self._ended):
                waker.__exit__()
