"""Whether work gets on, told by its progress: a process that is there may hang."""

from __future__ import annotations

import threading
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from outbox import clock

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


@dataclass(frozen=True, slots=True)
class Hang:
    """What does not get on, for how many seconds, and how many would have been well."""

    doing: str
    for_s: float
    limit_s: float

    def __str__(self) -> str:
        return f"no progress for {self.for_s:.1f} s while {self.doing} (limit {self.limit_s:g} s)"


class Task:
    """Work under way with a time limit of its own; see `Progress.task`."""

    def __init__(self, doing: str, *, limit_s: float, seconds: Callable[[], float]) -> None:
        self.doing = doing
        self.limit_s = limit_s
        self._seconds = seconds
        self._noted_at = seconds()

    def note(self) -> None:
        """Note that it got on: its limit counts from now."""
        self._noted_at = self._seconds()

    @property
    def age_s(self) -> float:
        """How many seconds ago it began or last got on."""
        return max(0.0, self._seconds() - self._noted_at)


class Progress:
    """What a loop notes as it gets on, and others ask about, from any thread.

    A loop notes each step as it begins it, which says that the step before has ended. Work beside the loop that has a limit
    of its own, such as a handler in a worker thread, is a `task`. A step or a task that is over its limit hangs. The
    clock runs on through a suspend of the machine where it can: after one, everything is old until it gets on.

    Not guaranteed: that what gets on also succeeds. A loop that meets an outage and waits for its end gets on.
    """

    def __init__(self, doing: str = "starting", *, seconds: Callable[[], float] | None = None) -> None:
        self._seconds = seconds or clock.seconds
        self._last = (self._seconds(), doing)
        self._lock = threading.Lock()
        self._tasks: set[Task] = set()

    def note(self, doing: str | None = None, *, rest_s: float = 0.0) -> None:
        """Note that the loop got on, and what it does next (None: still the same).

        `rest_s`: it is going to wait for so many seconds on purpose, and is only older than nothing after them.
        """
        self._last = (self._seconds() + rest_s, self._last[1] if doing is None else doing)

    @property
    def doing(self) -> str:
        """What the loop does now."""
        return self._last[1]

    @property
    def age_s(self) -> float:
        """How many seconds ago the loop last got on; 0 while it waits on purpose."""
        return max(0.0, self._seconds() - self._last[0])

    @contextmanager
    def task(self, doing: str, *, limit_s: float) -> Iterator[Task]:
        """Count the block as work that hangs once it has not got on for `limit_s` seconds.

        Each task counts for itself, beside the loop and other tasks, in whatever thread it is. Its `note` restarts its
        limit and is no progress of the loop, nor is its end.
        """
        task = Task(doing, limit_s=limit_s, seconds=self._seconds)
        with self._lock:
            self._tasks.add(task)
        try:
            yield task
        finally:
            with self._lock:
                self._tasks.discard(task)

    def alive(self, limit_s: float) -> bool:
        """Tell whether the loop got on within the last `limit_s` seconds, and every task within its own limit."""
        return self.hung(limit_s) is None

    def hung(self, limit_s: float) -> Hang | None:
        """Return what hangs, the longest over its limit if there are several; None when all is well."""
        with self._lock:
            each = [Hang(task.doing, task.age_s, task.limit_s) for task in self._tasks]
        each.append(Hang(self.doing, self.age_s, limit_s))
        over = [one for one in each if one.for_s > one.limit_s]
        return max(over, key=lambda one: one.for_s - one.limit_s, default=None)
