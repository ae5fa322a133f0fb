"""Time limits on handlers: first an exception in the handler, then the thread is given up and may not commit any more."""

from __future__ import annotations

import asyncio
import ctypes
import threading
from contextlib import contextmanager
from contextvars import ContextVar
from enum import Enum
from typing import TYPE_CHECKING, Any

from outbox import clock
from outbox.inbox.errors import TimeLimitExceeded

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator

    from outbox.inbox.handlers import Rules

_raise_in_thread = ctypes.pythonapi.PyThreadState_SetAsyncExc


class _Stage(Enum):
    IDLE = "idle"
    RUNNING = "running"
    COMMITTING = "committing"
    GIVEN_UP = "given up"


class Guard:
    """Watches over one try of one message: used by the thread that runs the handler, and by the one that enforces its limits."""

    def __init__(self) -> None:
        self.on_progress: Callable[[], None] = lambda: None
        """Called when the handler says that it goes on."""
        self._lock = threading.Lock()
        self._stage = _Stage.IDLE
        self._thread: int | None = None
        self._soft_at = self._hard_at = float("inf")
        self._limits_s = (float("inf"), 0.0)
        self._warned = False

    @contextmanager
    def running(self, rules: Rules, *, interruptible: bool) -> Iterator[None]:
        """Limit the block, which runs a handler. Only a plain handler is `interruptible`: an async one is cancelled."""
        with self._lock:
            self._stage = _Stage.RUNNING
            self._thread = threading.get_ident() if interruptible else None
            self._limits_s = (rules.soft_limit_s or float("inf"), rules.time_limit_s)
            self._warned = False
            self._restart()
        token = _current.set(self)
        try:
            yield
        finally:
            self._leave()
            _current.reset(token)

    def progress(self) -> None:
        """Note that the handler goes on: its limits count from now."""
        with self._lock:
            self._restart()
        self.on_progress()

    def _restart(self) -> None:
        now = clock.seconds()
        self._soft_at, self._hard_at = (now + limit_s for limit_s in self._limits_s)

    def may_commit(self) -> None:
        """Note that the handler is done and its transaction is about to commit. Raises `TimeLimitExceeded` if it was given up."""
        with self._lock:
            self._disarm()
            if self._stage is _Stage.GIVEN_UP:
                raise self.exceeded()
            self._stage = _Stage.COMMITTING

    def enforce(self) -> bool:
        """Interrupt a handler that is past its soft limit; tell whether one is past its hard limit, and given up with this call."""
        now = clock.seconds()
        with self._lock:
            if self._stage is not _Stage.RUNNING:
                return False
            if now >= self._hard_at:
                self._stage = _Stage.GIVEN_UP
                return True
            if now >= self._soft_at and not self._warned and self._thread is not None:
                self._warned = True
                _raise_in_thread(ctypes.c_ulong(self._thread), ctypes.py_object(TimeLimitExceeded))
            return False

    @property
    def given_up(self) -> bool:
        """Whether the handler was given up: what comes of it is of no interest any more."""
        with self._lock:
            return self._stage is _Stage.GIVEN_UP

    def exceeded(self) -> TimeLimitExceeded:
        """Return the error that says that the hard limit was reached."""
        return TimeLimitExceeded(f"the handler was given up after {self._limits_s[1]:g} s (time_limit_s)")

    def _leave(self) -> None:
        while True:  # the exception of the soft limit may still arrive in here
            try:
                with self._lock:
                    self._disarm()
                    if self._stage is not _Stage.GIVEN_UP:
                        self._stage = _Stage.IDLE
                return
            except TimeLimitExceeded:
                continue

    def _disarm(self) -> None:
        if self._warned and self._thread is not None:
            _raise_in_thread(ctypes.c_ulong(self._thread), None)
        self._thread = None


_current: ContextVar[Guard | None] = ContextVar("outbox_guard", default=None)


def current() -> Guard | None:
    """Return the guard over the running handler."""
    return _current.get()


def may_commit() -> None:
    """Ask the guard over the running handler, if there is one, whether its transaction may still commit."""
    guard = _current.get()
    if guard is not None:
        guard.may_commit()


async def within(called: Awaitable[Any], rules: Rules) -> Any:
    """Await an async handler; past its soft limit, or else its hard one, it is cancelled and `TimeLimitExceeded` raised."""
    limit_s = rules.soft_limit_s or rules.time_limit_s
    try:
        async with asyncio.timeout(limit_s) as limit:
            return await called
    except TimeoutError as error:
        if not limit.expired():
            raise  # the handler's own
        raise TimeLimitExceeded(f"the handler was cancelled after {limit_s:g} s") from error
