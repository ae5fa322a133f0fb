"""The threads that handle messages."""

from __future__ import annotations

import queue
import threading
from contextlib import suppress
from time import monotonic
from typing import TYPE_CHECKING, Self

from outbox.inbox.jobs import Finished, Job

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from outbox.inbox.inbox import Result


class Workers:
    """Runs `handle` for each submitted job in one of its threads; the outcomes come back through `finished`.

    A context manager. All methods are for the thread that made it; `wake` is called from the workers. A thread whose handler
    has reached its time limit is given up, and another takes its place. Those that still run at the end are left behind as
    daemons: they end with the process.
    """

    def __init__(self, handle: Callable[[Job], Result], *, threads: int, wake: Callable[[], None]) -> None:
        self._handle = handle
        self._wake = wake
        self._waiting: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._finished: queue.SimpleQueue[Finished] = queue.SimpleQueue()
        self._running: dict[threading.Thread, Job] = {}
        self._given_up: list[threading.Thread] = []
        self._threads = [self._new_thread() for _ in range(threads)]
        self.unfinished = 0
        """How many jobs were submitted and have not come back."""

    @property
    def stuck(self) -> int:
        """How many threads were given up and still hang in their handlers."""
        self._given_up = [thread for thread in self._given_up if thread.is_alive()]
        return len(self._given_up)

    def submit(self, job: Job) -> None:
        """Have a job done as soon as a thread is free."""
        self.unfinished += 1
        self._waiting.put(job)

    def finished(self) -> Iterator[Finished]:
        """Yield what has finished since the last call, without waiting."""
        while not self._finished.empty():
            self.unfinished -= 1
            yield self._finished.get()

    def enforce_limits(self) -> None:
        """Interrupt handlers past their soft limit; give up those past the hard one, and have that written down."""
        for thread, job in list(self._running.items()):
            if job.guard.enforce():
                self._given_up.append(thread)
                self._new_thread().start()
                self._waiting.put(Job(job.work, job.delivery, job.guard.exceeded()))

    def join(self, deadline: float) -> None:
        """Wait until all has finished or the monotonic clock reaches `deadline`."""
        while self.unfinished:
            try:
                self._finished.get(timeout=max(0.0, deadline - monotonic()))
            except queue.Empty:
                return
            self.unfinished -= 1

    def drop_waiting(self) -> list[Job]:
        """Forget the jobs that no thread has started on, and return them."""
        dropped: list[Job] = []
        while not self._waiting.empty():
            with suppress(queue.Empty):
                job = self._waiting.get_nowait()
                dropped += [job] if job is not None else []
        self.unfinished -= len(dropped)
        return dropped

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.drop_waiting()
        for _thread in range(len(self._threads) + len(self._given_up)):
            self._waiting.put(None)

    def _new_thread(self) -> threading.Thread:
        return threading.Thread(target=self._work, name="outbox-consume", daemon=True)

    def _work(self) -> None:
        me = threading.current_thread()
        while (job := self._waiting.get()) is not None:
            self._running[me] = job
            finished = Finished(job) if job.lost else self._try(job)
            del self._running[me]
            if job.guard.given_up:
                return  # another thread has taken this one's place, and somebody has written that down
            self._finished.put(finished)
            self._wake()

    def _try(self, job: Job) -> Finished:
        try:
            return Finished(job, result=self._handle(job))
        except BaseException as error:  # noqa: BLE001 - also SystemExit: a handler does not end a worker
            return Finished(job, error=error)
