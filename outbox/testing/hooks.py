"""What happens at the named points of a delivery: a kill, an error, or a pause until another delivery has come as far as it can."""

from __future__ import annotations

import asyncio
import threading
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING

from sqlalchemy.util import await_only

from outbox import points

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from outbox.points import Point

LOOK_AGAIN_S = 0.005


class Killed(BaseException):
    """Stands for the end of the process: nothing that runs in it can catch it on purpose."""


class RolledBack(Exception):
    """Stands for whatever makes the database roll back after the handler has returned."""


class Hooks:
    """Sits at `outbox.points.hook`: notes which points are passed, and raises or waits at one of them, once."""

    def __init__(self) -> None:
        self.passed: list[Point] = []
        self._armed: dict[Point, Callable[[], None]] = {}
        self._lock = threading.Lock()

    def __call__(self, point: Point) -> None:
        """Note that a point is passed, and do what was asked for there."""
        self.passed.append(point)
        with self._lock:
            act = self._armed.pop(point, None)
        if act is not None:
            act()

    def at(self, point: Point, act: Callable[[], None]) -> None:
        """Do something the next time that the point is passed."""
        self._armed[point] = act

    def clear(self) -> None:
        """Do nothing any more, and forget what was passed."""
        self._armed.clear()
        self.passed.clear()


@contextmanager
def hooked() -> Iterator[Hooks]:
    """Put `Hooks` in place for the block."""
    hooks, before = Hooks(), points.hook
    points.hook = hooks
    try:
        yield hooks
    finally:
        points.hook = before


class Gate:
    """Holds whoever comes to it, in a thread or in a greenlet of an event loop, until it is opened or the time is over."""

    def __init__(self, *, is_async: bool, timeout_s: float) -> None:
        self._is_async = is_async
        self._timeout_s = timeout_s
        self.reached = threading.Event()
        self._opened = threading.Event()

    def hold(self) -> None:
        """Wait until it is opened."""
        self.reached.set()
        if not self._is_async:
            self._opened.wait(self._timeout_s)
            return
        deadline = time.monotonic() + self._timeout_s
        while not self._opened.is_set() and time.monotonic() < deadline:
            await_only(asyncio.sleep(LOOK_AGAIN_S))

    def open(self) -> None:
        """Let go whoever waits."""
        self._opened.set()
