"""Claims failed messages whose next try is due, for the consumer's workers."""

from __future__ import annotations

import queue
import threading
from random import uniform
from typing import TYPE_CHECKING, Self

from sqlalchemy.exc import SQLAlchemyError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from outbox.inbox.receiving import Work
    from outbox.outage import Outage

POLL_S = 1.0
_LAST_WORDS_S = 2.0  # a database that is away does not hold up the stop


class Retrier:
    """Looks for due messages in a thread of its own, and hands them out through `claimed`, never more than `most` at a time.

    A context manager. A share of the workers is all that failing messages ever get, so they cannot keep the others waiting.
    """

    def __init__(self, claim: Callable[[int], list[Work]], database: Outage, *, most: int, wake: Callable[[], None]) -> None:
        self._claim = claim
        self._database = database
        self._wake = wake
        self._free = most
        self._changed = threading.Condition()
        self._stopping = False
        self._look_now = False
        self._claimed: queue.SimpleQueue[Work] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="outbox-consume-retries", daemon=True)

    def claimed(self) -> Iterator[Work]:
        """Yield what was claimed since the last call, without waiting; each is to be followed by `done`."""
        while not self._claimed.empty():
            yield self._claimed.get()

    def done(self) -> None:
        """Note that one of those handed out has come to its end. There may be more: the next of its key, for one."""
        with self._changed:
            self._free += 1
            self._look_now = True
            self._changed.notify()

    def stop(self) -> None:
        """Claim nothing more, and wait a moment for a claim that is under way: what it takes has to be given back."""
        with self._changed:
            self._stopping = True
            self._changed.notify()
        self._thread.join(_LAST_WORDS_S)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _run(self) -> None:
        pause_s = 0.0
        while most := self._wait(pause_s):
            pause_s = self._look(most)

    def _wait(self, pause_s: float) -> int:
        """Wait for so long, or until there is a reason to look; then for a free place. Return how many there are, 0 to end."""
        with self._changed:
            self._changed.wait_for(lambda: self._stopping or self._look_now, timeout=pause_s)
            self._changed.wait_for(lambda: self._stopping or self._free > 0)
            self._look_now = False
            return 0 if self._stopping else self._free

    def _look(self, most: int) -> float:
        try:
            works = self._claim(most)
        except SQLAlchemyError as error:
            return self._database.pause_s(error)
        self._database.over()
        with self._changed:
            self._free -= len(works)
        for work in works:
            self._claimed.put(work)
        if works:
            self._wake()
        return 0.0 if len(works) == most else POLL_S * uniform(0.75, 1.0)
