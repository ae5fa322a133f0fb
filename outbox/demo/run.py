"""Runs the demo: starts everything, kills the relay in mid-batch, and ends when all is at rest."""

from __future__ import annotations

from dataclasses import dataclass
from time import monotonic
from typing import TYPE_CHECKING

from outbox.demo.observer import observing
from outbox.demo.processes import Processes
from outbox.demo.setup import create_tables
from outbox.demo.shop import Shop
from outbox.demo.watch import Watch
from outbox.errors import OutboxError

if TYPE_CHECKING:
    import threading

    from outbox.demo.display import Display
    from outbox.demo.folder import Folder
    from outbox.demo.plan import Plan
    from outbox.demo.watch import View

_TICK_S = 0.01


class DemoStopped(OutboxError):
    """The demo was stopped before its end."""


class DemoTimedOut(OutboxError):
    """The demo took longer than it may."""


@dataclass(frozen=True, slots=True)
class Ended:
    """How it ended: `kills` in mid-batch, and what was left when the time was over, or `None` when all was done."""

    kills: int
    left: str | None


class Demo:
    """One demo in a folder."""

    def __init__(self, folder: Folder, plan: Plan, display: Display, stop: threading.Event) -> None:
        self._folder = folder
        self._plan = plan
        self._display = display
        self._stop = stop
        self._deadline = monotonic() + plan.timeout_s
        self._kills = 0
        self._was_killed = False

    def run(self) -> Ended:
        """Run until all is at rest or the time is over. Nothing is running afterwards.

        Raises `DemoStopped`, `ProcessEnded`, `DemoTimedOut` if the time was over before it began, and
        `ConfigurationError` for a folder that cannot be used.
        """
        self._folder.create()
        create_tables(self._folder)
        with observing(self._folder) as connection, Processes(self._folder) as processes:
            watch = Watch(connection)
            self._open_queue(watch, processes)
            with Shop(self._folder, orders=self._plan.orders, rollback=self._plan.rollback) as shop:
                in_time = self._follow(watch, processes, shop)
            processes.stop()
            view = watch.look()
            self._display.end(view)
        return Ended(self._kills, left=None if in_time else _left(view))

    def _open_queue(self, watch: Watch, processes: Processes) -> None:
        processes.start_consumer()
        while not watch.queue_is_there:
            if self._time_is_over(processes):
                raise DemoTimedOut(f"the consumer has not declared its queue after {self._plan.timeout_s:g} s")
        self._display.say("consumer started, as a process of its own")

    def _follow(self, watch: Watch, processes: Processes, shop: Shop) -> bool:
        while True:
            was_open = shop.open  # asked before the look, or the last orders could be missed
            view = watch.look()
            self._display.show(view)
            if shop.error is not None:
                raise shop.error
            if view.at_rest and not was_open:
                return True
            self._steer(view, watch, processes)
            if self._time_is_over(processes):
                return False

    def _steer(self, view: View, watch: Watch, processes: Processes) -> None:
        if not processes.relay_runs:
            if self._plan.relay_is_due(view):
                watch.relay_starts()
                processes.start_relay()
                self._display.say("relay started again" if self._was_killed else "relay started, as a process of its own")
        elif self._plan.kill_is_due(view, done=self._kills):
            self._kill_relay(watch, processes)

    def _kill_relay(self, watch: Watch, processes: Processes) -> None:
        processes.kill_relay()
        in_flight = watch.look().in_flight  # exact now: nobody publishes or settles any more
        self._was_killed = True
        self._kills += in_flight > 0
        self._display.say(f"relay killed with SIGKILL, {in_flight or 'no'} messages in flight", colour="red")

    def _time_is_over(self, processes: Processes) -> bool:
        processes.check()
        if self._stop.wait(_TICK_S):
            raise DemoStopped
        return monotonic() >= self._deadline


def _left(view: View) -> str:
    unshipped = max(0, view.committed - view.shipped)
    return f"{view.in_outbox} messages in the outbox, {view.in_broker} in the broker, {unshipped} orders to ship"
