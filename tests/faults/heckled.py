"""A listener that raises at every event of telemetry, one time an error and the next time what would end a process."""

from itertools import count

from outbox.observe.logs import logged
from outbox.telemetry import Subscriber, Telemetry, TelemetryEvent

_calls = count()


def heckle(event: TelemetryEvent) -> None:
    """Raise."""
    if next(_calls) % 2:
        raise SystemExit(f"no more after {event!r}")
    raise RuntimeError(f"do not like {event!r}")


def heckled(*subscribers: Subscriber) -> Telemetry:
    """Return the telemetry of a command, with that listener first and last."""
    return logged(heckle, *subscribers, heckle)
