"""The catalogue of what relays and consumers tell while they work; logs, metrics and traces subscribe to it."""

from outbox.telemetry.bus import Subscriber, Telemetry, TelemetryEvent
from outbox.telemetry.consumer import DuplicateDropped, HandlingBegan, HandlingEnded, MessageDied, MessageHandled, MessageRetried
from outbox.telemetry.relay import (
    BatchClaimed,
    BatchFenced,
    BatchPublished,
    BatchSettled,
    CleanedUp,
    LeaseRenewed,
    PublishBegan,
    PublishFailed,
    PublishGivenUp,
)
from outbox.telemetry.servers import BreakerChanged, BrokerStateChanged, DatabaseStateChanged

__all__ = [
    "BatchClaimed",
    "BatchFenced",
    "BatchPublished",
    "BatchSettled",
    "BreakerChanged",
    "BrokerStateChanged",
    "CleanedUp",
    "DatabaseStateChanged",
    "DuplicateDropped",
    "HandlingBegan",
    "HandlingEnded",
    "LeaseRenewed",
    "MessageDied",
    "MessageHandled",
    "MessageRetried",
    "PublishBegan",
    "PublishFailed",
    "PublishGivenUp",
    "Subscriber",
    "Telemetry",
    "TelemetryEvent",
]
