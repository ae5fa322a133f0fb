"""The ways in which a broker may deliver a message: each as a scenario with a name."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from itertools import permutations
from typing import TYPE_CHECKING

from outbox.inbox.handlers import Mode
from outbox.points import Point
from outbox.testing.hooks import Killed, RolledBack
from outbox.testing.overlap import overtaken, taken_over

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Sequence

    from outbox.inbox import Message
    from outbox.testing.delivery import Delivery

_ALL_ORDERS = 4  # of more messages than so many, some orders


class Scenario(StrEnum):
    """What may happen to one message."""

    TWICE = "delivered twice in a row"
    TOGETHER = "delivered twice at the same time"
    KILLED = "killed, then delivered again"
    ROLLED_BACK = "rolled back after the handler, then delivered again"
    LEASE_LOST = "delivered again while it runs, because its lease ran out"
    LATE = "delivered again after later messages"
    OUT_OF_ORDER = "delivered in another order"


@dataclass(frozen=True, slots=True)
class Run:
    """One scenario in one variant: what it is called in a report, and what does it."""

    title: str
    deliver: Callable[[Delivery], None]


@dataclass(frozen=True, slots=True)
class Story:
    """The message, its neighbours of the same key, and what one plain delivery showed: the mode and the points it passes."""

    before: Sequence[Message]
    message: Message
    after: Sequence[Message]
    mode: Mode
    passed: Collection[Point]

    def runs(self, scenario: Scenario) -> Iterator[Run]:
        """Yield the variants of a scenario; none when it does not apply."""
        match scenario:
            case Scenario.TWICE:
                yield self._run(scenario, partial(_twice, self.message))
            case Scenario.TOGETHER:
                yield self._run(scenario, partial(_together, self.message, self._last))
            case Scenario.KILLED:
                yield from (
                    self._run(f"killed {point}, then delivered again", partial(_killed, self.message, point))
                    for point in self.passed
                )
            case Scenario.ROLLED_BACK if self._last in self.passed:
                yield self._run(scenario, partial(_rolled_back, self.message, self._last))
            case Scenario.LEASE_LOST if self._last is Point.BEFORE_COMPLETE:
                yield self._run(scenario, partial(_lease_lost, self.message))
            case Scenario.LATE if self.after:
                yield Run(scenario, lambda delivery: delivery.all_of([*self.before, self.message, *self.after, self.message]))
            case Scenario.OUT_OF_ORDER:
                messages = [*self.before, self.message, *self.after]
                yield from (Run(_order(order, messages), partial(_in_order, order)) for order in _orders(messages))

    @property
    def _last(self) -> Point:
        """The last point before everything is committed."""
        return Point.BEFORE_COMPLETE if self.mode is Mode.LEASED else Point.BEFORE_COMMIT

    def _run(self, title: str, deliver: Callable[[Delivery], None]) -> Run:
        def run(delivery: Delivery) -> None:
            delivery.all_of(self.before)
            delivery.hooks.clear()
            deliver(delivery)
            delivery.hooks.clear()
            delivery.all_of(self.after)

        return Run(title, run)


def _twice(message: Message, delivery: Delivery) -> None:
    delivery.all_of([message])
    delivery.again(message)


def _killed(message: Message, point: Point, delivery: Delivery) -> None:
    _failing(message, point, Killed(point), delivery)
    delivery.die()
    delivery.pass_time()
    delivery.again(message)


def _rolled_back(message: Message, point: Point, delivery: Delivery) -> None:
    _failing(message, point, RolledBack("the database has rolled back"), delivery)
    delivery.again(message)


def _failing(message: Message, point: Point, error: BaseException, delivery: Delivery) -> None:
    def fail() -> None:
        raise error

    delivery.hooks.at(point, fail)
    delivery.attempt(message)


def _together(message: Message, point: Point, delivery: Delivery) -> None:
    if not delivery.database.is_shared:  # one writer at a time: the second delivery waits for the end of the first
        _twice(message, delivery)
    elif not overtaken(message, point, delivery):
        delivery.again(message)


def _lease_lost(message: Message, delivery: Delivery) -> None:
    if delivery.database.is_shared:
        taken_over(message, Point.BEFORE_COMPLETE, delivery)
    delivery.again(message)


def _in_order(messages: Sequence[Message], delivery: Delivery) -> None:
    delivery.all_of(messages)


def _orders(messages: Sequence[Message]) -> list[tuple[Message, ...]]:
    """Return the other orders: all of few messages, and of many the reverse and each exchange of two neighbours."""
    if len(messages) <= _ALL_ORDERS:
        return list(permutations(messages))[1:]
    exchanged = [(*messages[:at], messages[at + 1], messages[at], *messages[at + 2 :]) for at in range(len(messages) - 1)]
    return [tuple(reversed(messages)), *exchanged]


def _order(messages: Sequence[Message], usual: Sequence[Message]) -> str:
    places = ", ".join(str(usual.index(message) + 1) for message in messages)
    return f"{Scenario.OUT_OF_ORDER}: {places}"
