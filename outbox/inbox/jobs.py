"""What the threads of a consumer work on: one try of one message, wherever it came from."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from outbox.inbox.errors import UnusableMessage
from outbox.inbox.limits import Guard
from outbox.inbox.message import Message, from_kombu
from outbox.inbox.receiving import Work

if TYPE_CHECKING:
    from outbox.inbox.inbox import Result
    from outbox.inbox.link import Delivery


@dataclass(frozen=True, slots=True, eq=False)
class Job:
    """One try. `delivery` is None for a message that was claimed among the failed ones; `error`: it has failed already."""

    work: Work
    delivery: Delivery | None = None
    error: BaseException | None = None
    guard: Guard = field(default_factory=Guard)

    @property
    def key(self) -> str | None:
        """The ordering key of the message."""
        return self.work.message.key

    @property
    def lost(self) -> bool:
        """Whether the link is gone that the delivery came on: the broker delivers it again, so it is not worth beginning."""
        return self.delivery is not None and not self.delivery.link.alive


@dataclass(frozen=True, slots=True)
class Finished:
    """What became of one job: a result, or the error; neither when it was not begun."""

    job: Job
    result: Result | None = None
    error: BaseException | None = None


def from_delivery(delivery: Delivery) -> Job:
    """Return the job that a delivery is; one that cannot be read as a message has failed already."""
    if delivery.error is None:
        try:
            return Job(Work(from_kombu(delivery.received)), delivery)
        except (LookupError, ValueError) as error:  # a content encoding that nobody knows, or that does not fit
            return _unreadable(delivery, error)
    return _unreadable(delivery, delivery.error)


def _unreadable(delivery: Delivery, error: Exception) -> Job:
    received = delivery.received
    payload = received.body.encode(errors="backslashreplace") if isinstance(received.body, str) else bytes(received.body or b"")
    message = Message(
        message_id=str((received.properties or {}).get("message_id") or ""),
        topic=str((received.delivery_info or {}).get("routing_key") or ""),
        payload=payload,
        headers={"content-encoding": received.content_encoding},
    )
    return Job(Work(message), delivery, UnusableMessage(f"the message cannot be unpacked: {error}"))
