"""What FastStream's `AckPolicy` of a subscriber means for a message whose effects were rolled back."""

from __future__ import annotations

from enum import StrEnum
from typing import Any

from faststream.middlewares import AckPolicy


class Safety(StrEnum):
    """How a message comes back after a failure."""

    SAFE = "safe"  # FastStream gives it back to the broker, or the queue passes it on to its dead-letter exchange
    PROTECTED = "protected"  # FastStream would drop it: the middleware gives it back first
    LOST = "lost"  # the broker has forgotten it before the handler began
    REFUSED = "refused"  # the handler itself acknowledges, and that comes before the COMMIT


_FIXED = {
    AckPolicy.NACK_ON_ERROR: Safety.SAFE,
    AckPolicy.ACK: Safety.PROTECTED,
    AckPolicy.ACK_FIRST: Safety.LOST,
    AckPolicy.MANUAL: Safety.REFUSED,
}


def safety_of(subscriber: Any, *, dead_lettered: bool) -> Safety:
    """Tell what happens to a failed message of a subscriber; `dead_lettered`: a policy of the broker has an exchange for it."""
    policy = subscriber.ack_policy
    if policy in _FIXED:
        return _FIXED[policy]
    arguments = getattr(getattr(subscriber, "queue", None), "arguments", None) or {}
    passed_on = dead_lettered or "x-dead-letter-exchange" in arguments
    return Safety.SAFE if passed_on else Safety.PROTECTED


def advice(subscriber: Any) -> str:
    """Return what is wrong with a subscriber's policy, and what to do."""
    name, policy = subscriber.specification.call_name, subscriber.ack_policy.name
    return f"subscriber {name!r} has ack_policy={policy}, which loses messages; use ack_policy=AckPolicy.NACK_ON_ERROR"
