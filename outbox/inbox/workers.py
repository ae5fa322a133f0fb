"""The threads that run handlers."""

from __future__ import annotations

import queue
import threading
from dataclasses import dataclass
from time import monotonic
from typing import TYPE_CHECKING, Self

from outbox.inbox.errors import UnusableMessage
from outbox.inbox.message import Message, from_kombu

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from outbox.inbox.inbox import Result
    from outbox.inbox.link import Delivery


@dataclass(frozen=True, slots=True)
class Finished:
    """What became of one delivery: a result, or the error; neither when its link was lost before its turn came.

    `message` is None when it could not even be read.
    """

    delivery: Delivery
    message: Message | None
    result: Result | None = None
    error: BaseException | None = None


class Workers:
    """Runs `process` for each submitted delivery in one of its threads; the outcomes come back through `finished`.

    A context manager. All methods are for the thread that made it; `wake` is called from the workers. Threads that
    still run a handler at the end are left behind as daemons: they end with the process.
    """

    def __init__(self, process: Callable[[Message], Result], *, threads: int, wake: Callable[[], None]) -> None:
        self._process = process
        self._wake = wake
        self._waiting: queue.SimpleQueue[Delivery | None] = queue.SimpleQueue()
        self._finished: queue.SimpleQueue[Finished] = queue.SimpleQueue()
        self._threads = [
            threading.Thread(target=self._work, name=f"outbox-consume-{number}", daemon=True) for number in range(threads)
        ]
        self.unfinished = 0
        """How many deliveries were submitted and have not come back."""

    def submit(self, delivery: Delivery) -> None:
        """Have a delivery handled as soon as a thread is free."""
        self.unfinished += 1
        self._waiting.put(delivery)

    def finished(self) -> Iterator[Finished]:
        """Yield what has finished since the last call, without waiting."""
        while not self._finished.empty():
            self.unfinished -= 1
            yield self._finished.get()

    def join(self, deadline: float) -> None:
        """Start on nothing new, and wait until all has finished or the monotonic clock reaches `deadline`."""
        self.drop_waiting()
        while self.unfinished:
            try:
                self._finished.get(timeout=max(0.0, deadline - monotonic()))
            except queue.Empty:
                return
            self.unfinished -= 1

    def drop_waiting(self) -> None:
        """Forget the deliveries that no thread has started on."""
        while not self._waiting.empty():
            try:
                self._waiting.get_nowait()
            except queue.Empty:
                return
            self.unfinished -= 1

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.drop_waiting()
        for _thread in self._threads:
            self._waiting.put(None)

    def _work(self) -> None:
        while (delivery := self._waiting.get()) is not None:
            self._finished.put(self._handle(delivery) if delivery.link.alive else Finished(delivery, None))
            self._wake()

    def _handle(self, delivery: Delivery) -> Finished:
        message = None
        try:
            message = _read(delivery)
            return Finished(delivery, message, result=self._process(message))
        except BaseException as error:  # noqa: BLE001 - also SystemExit: a handler does not end a worker
            return Finished(delivery, message, error=error)


def _read(delivery: Delivery) -> Message:
    if delivery.error is not None:
        raise UnusableMessage(f"the message cannot be unpacked: {delivery.error}") from delivery.error
    return from_kombu(delivery.received)
