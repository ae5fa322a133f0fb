"""Tells telemetry of the messages of a batch that have failed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from outbox.states import State
from outbox.telemetry import PublishFailed, PublishGivenUp

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from outbox.relay.settling import Settlement
    from outbox.telemetry import TelemetryEvent


def tell_failures(
    failures: Iterable[Settlement], emit: Callable[[TelemetryEvent], None]
) -> PublishFailed | PublishGivenUp | None:
    """Emit one event for each message; return the first."""
    first = None
    for each in failures:
        event = _event(each)
        first = first or event
        emit(event)
    return first


def _event(each: Settlement) -> PublishFailed | PublishGivenUp:
    row, verdict, decision = each.row, each.verdict, each.decision
    about: dict[str, Any] = {
        "message_id": row.message_id,
        "topic": row.topic,
        "headers": row.headers or {},
        "attempts": decision.attempts,
    }
    why: dict[str, Any] = {"reason": verdict.reason, "error_class": verdict.error_class}
    if each.state is State.DEAD:
        return PublishGivenUp(**about, **why)
    return PublishFailed(**about, **why, retry_in_s=decision.delay_s)
