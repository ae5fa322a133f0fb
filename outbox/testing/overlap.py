"""Two deliveries of one message that are at work at the same moment."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from time import monotonic, sleep
from typing import TYPE_CHECKING

from outbox.testing.hooks import LOOK_AGAIN_S, Gate

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from concurrent.futures import Future

    from outbox.inbox import Message
    from outbox.points import Point
    from outbox.testing.delivery import Delivery

_HOLD_S = 30.0
_MEET_S = 1.0


def overtaken(message: Message, point: Point, delivery: Delivery) -> bool:
    """Hold one delivery at the point until another has come as far as it can: to its end, or to a lock of the first.

    Returns whether both have succeeded.
    """
    with ThreadPoolExecutor(1) as threads:
        with _held(message, point, delivery) as first:
            second = threads.submit(delivery.attempt, message)
            _until(lambda: second.done() or delivery.call(delivery.database.lock_waiters) > 0, seconds=_MEET_S)
        return first.result() is None and second.result() is None


def taken_over(message: Message, point: Point, delivery: Delivery) -> None:
    """Hold one delivery at the point until its lease is over, and another has handled the message from its start to its end."""
    with _held(message, point, delivery):
        delivery.pass_time()
        delivery.attempt(message)


@contextmanager
def _held(message: Message, point: Point, delivery: Delivery) -> Iterator[Future[BaseException | None]]:
    """Deliver in a thread, and hold that delivery at the point for the block; then let it go on, and wait for its end."""
    gate = Gate(is_async=delivery.inbox.is_async, timeout_s=_HOLD_S)
    delivery.hooks.at(point, gate.hold)
    with ThreadPoolExecutor(1) as threads:
        first = threads.submit(delivery.attempt, message)
        try:
            _until(lambda: gate.reached.is_set() or first.done(), seconds=_HOLD_S)
            yield first
        finally:
            gate.open()


def _until(condition: Callable[[], bool], *, seconds: float) -> None:
    deadline = monotonic() + seconds
    while not condition() and monotonic() < deadline:
        sleep(LOOK_AGAIN_S)
