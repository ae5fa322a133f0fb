"""What a consumer tells: about each try of each message."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from outbox.telemetry.bus import TelemetryEvent


@dataclass(frozen=True)
class _OfMessage(TelemetryEvent):
    """`message_id` is empty for a message without one. `headers` are those of the message, the relay's own included."""

    consumer: str
    message_id: str
    topic: str
    headers: Mapping[str, Any] = field(repr=False)


@dataclass(frozen=True)
class HandlingBegan(_OfMessage):
    """A try begins: its transaction or lease first, then, unless the message is a duplicate, the handler, in this very thread.

    `handler` is the topic pattern that the handler is registered under. `HandlingEnded` follows in the same thread, or
    never when the process is killed or the handler hangs for good. Not for a message that nothing handles.
    """

    handler: str


@dataclass(frozen=True)
class HandlingEnded(_OfMessage):
    """A try has ended, after so many seconds, its COMMIT included. `error` is what it raised; everything was rolled back then.

    `ran` is false for a duplicate, whose handler was not called. Not promised: that `error` counts against the message, or
    that this is the end. What becomes of the message is told by `MessageHandled`, `MessageRetried` and `MessageDied`; by none of them
    when others were at it or the database was away, and it is soon tried again.
    """

    handler: str
    seconds: float
    ran: bool
    error: BaseException | None = None


@dataclass(frozen=True)
class MessageHandled(_OfMessage):
    """A handler's effects are committed, and the message is about to be acknowledged.

    Not promised: that the broker gets to know. It may deliver the message again, which `DuplicateDropped` tells.
    """

    handler: str


@dataclass(frozen=True)
class DuplicateDropped(_OfMessage):
    """A message has come that was handled before: nothing was done, and it is about to be acknowledged."""


@dataclass(frozen=True)
class MessageRetried(_OfMessage):
    """A try has failed, and it is committed that the message is tried again in `retry_in_s` seconds. `attempts` counts this one.

    `error` is what the handler raised, and `reason` the same in words; `explained`: these say it all, a traceback adds nothing.
    """

    attempts: int
    error: BaseException
    reason: str
    explained: bool
    retry_in_s: float


@dataclass(frozen=True)
class MessageDied(_OfMessage):
    """A try has failed, and it is committed that the message is given up, until somebody retries it. `attempts` counts this one."""

    attempts: int
    error: BaseException
    reason: str
    explained: bool
