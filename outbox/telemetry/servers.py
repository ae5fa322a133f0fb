"""What relays and consumers tell about the servers that they work with."""

from __future__ import annotations

from dataclasses import dataclass

from outbox.telemetry.bus import TelemetryEvent


@dataclass(frozen=True)
class BrokerStateChanged(TelemetryEvent):
    """The broker is found in another state than before: `connected`, `blocked` (an alarm makes it take nothing) or `unreachable`.

    Fires also for the first state that is found. Not promised: that it is so at this moment, or that every change is seen. It
    is looked at when there is something to do, and a connection may break in silence.
    """

    state: str


@dataclass(frozen=True)
class BreakerChanged(TelemetryEvent):
    """Work with the broker is held up after a failure (`open`), each try by a longer pause, or goes on after the first success.

    `error` is what opened it. Not promised: that the broker is away. One that drops the connection over some message is there.
    """

    open: bool
    error: BaseException | None = None


@dataclass(frozen=True)
class DatabaseStateChanged(TelemetryEvent):
    """A statement of the work itself has failed because of the database (`up` is false), or the first one after that succeeded.

    Fires for the first failure of an outage and for its end; `error` is what came first. Not promised: that a database which nobody
    asks anything is known to be away.
    """

    up: bool
    error: BaseException | None = None
