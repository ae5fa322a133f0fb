"""Asks a slow question seldom, bounds how long the answer is waited for, and remembers it for a moment."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Answer(Generic[T]):
    """What came of the last time that it was asked: a value, or the error; neither while that takes too long.

    `waiting_s` is how long an answer has been waited for that did not come in time.
    """

    value: T | None = None
    error: Exception | None = None
    waiting_s: float | None = None


class Seldom(Generic[T]):
    """Calls `ask` in a thread of its own, and tells what came of it.

    However many want to know at once: it is called once at a time, and not again within `keep_s` seconds of the last one's
    end. Nobody waits for longer than `limit_s`; a call that hangs is not started again. Thread safe.
    """

    def __init__(
        self, ask: Callable[[], T], *, name: str, limit_s: float, keep_s: float, seconds: Callable[[], float] = time.monotonic
    ) -> None:
        self._ask = ask
        self._name = name
        self._limit_s = limit_s
        self._keep_s = keep_s
        self._seconds = seconds
        self._changed = threading.Condition()
        self._began_at: float | None = None  # of the call that runs
        self._fresh_until = float("-inf")
        self._answer: Answer[T] = Answer()

    def answer(self) -> Answer[T]:
        """Return the answer, an old one if it is not too old. Waits for a new one, but not for long."""
        with self._changed:
            if self._began_at is None and self._seconds() >= self._fresh_until:
                self._began_at = self._seconds()
                threading.Thread(target=self._run, name=self._name, daemon=True).start()
            if self._began_at is not None:
                left_s = self._began_at + self._limit_s - self._seconds()
                self._changed.wait_for(lambda: self._began_at is None, timeout=max(0.0, left_s))
            if self._began_at is not None:
                return Answer(waiting_s=self._seconds() - self._began_at)
            return self._answer

    def _run(self) -> None:
        try:
            answer = Answer(value=self._ask())
        except Exception as error:  # noqa: BLE001 - whatever it is, that is the answer
            answer = Answer(error=error)
        with self._changed:
            self._answer = answer
            self._began_at = None
            self._fresh_until = self._seconds() + self._keep_s
            self._changed.notify_all()
