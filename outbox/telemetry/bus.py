"""Hands each event to whoever has subscribed, and keeps from the work whatever goes wrong there."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from outbox import clock

log = logging.getLogger("outbox.telemetry")

COMPLAIN_EVERY_S = 60.0


@dataclass(frozen=True)
class TelemetryEvent:
    """Something that has happened to messages, leases or servers."""


Subscriber: TypeAlias = Callable[[TelemetryEvent], object]
"""Gets every event, in the thread in which it happened, one at a time per thread; picks by class what it is for."""


class Choosing:
    """A subscriber that is for some classes of events: `chosen` says what is done with each."""

    chosen: Mapping[type[TelemetryEvent], Callable[[Any], object]]

    def __call__(self, event: TelemetryEvent) -> None:
        """Do what is to be done with an event, if anything is."""
        do = self.chosen.get(type(event))
        if do is not None:
            do(event)


class Telemetry:
    """Its subscribers, fixed at the start and passed down. Thread safe, as far as they are.

    Guaranteed: a subscriber that raises, whatever it is, changes nothing about any message, and the next subscribers get the
    event all the same. It is logged, of one subscriber and class of event once a minute at most. Not guaranteed: anything about
    one that is slow or hangs. It is called in the thread that publishes or handles, which waits for it.
    """

    def __init__(self, *subscribers: Subscriber) -> None:
        self._subscribers = subscribers
        self._lock = threading.Lock()
        self._complained_at: dict[tuple[int, type[TelemetryEvent]], float] = {}

    def emit(self, event: TelemetryEvent) -> None:
        """Tell everybody. Never raises."""
        for place, subscriber in enumerate(self._subscribers):
            try:
                subscriber(event)
            except BaseException as error:  # noqa: BLE001 - also SystemExit: who only looks on decides nothing
                self._complain(place, event, error)

    def _complain(self, place: int, event: TelemetryEvent, error: BaseException) -> None:
        now = clock.seconds()
        with self._lock:
            last = self._complained_at.get((place, type(event)))
            if last is not None and now - last < COMPLAIN_EVERY_S:
                return
            self._complained_at[place, type(event)] = now
        extra = {"subscriber": repr(self._subscribers[place])[:200], "event": type(event).__name__}
        log.error("a subscriber to telemetry has failed; nothing else has", extra=extra, exc_info=error)
