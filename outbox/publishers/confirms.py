"""Matches the broker's confirms and returns on one channel with the rows that they are for."""

from __future__ import annotations

from time import monotonic
from typing import TYPE_CHECKING, Any

from outbox.publishers.deadends import UNROUTABLE
from outbox.publishers.flight import CONFIRMED
from outbox.publishers.frames import publish
from outbox.states import Outcome, Verdict

if TYPE_CHECKING:
    import amqp

    from outbox.outgoing import Outgoing
    from outbox.publishers.base import Control
    from outbox.publishers.flight import Flight
    from outbox.publishers.wire_message import WireMessage

BURST_MESSAGES = 16
BURST_BYTES = 64 * 1024
REFUSED = Verdict(Outcome.REFUSED, "broker: nack; a queue is full or has failed", "Nack")


class Confirms:
    """The delivery tags of one channel in confirm mode, which count from 1 with every publish.

    A confirm may cover many (`multiple`), and confirms may come out of order. An unroutable message comes back by
    `basic.return` *before* it is acked: only the two together tell that it went nowhere.
    """

    def __init__(self, channel: amqp.Channel) -> None:
        self.heard_at = monotonic()
        self._channel = channel
        self._tag = 0
        self._unconfirmed: dict[int, Outgoing] = {}
        self._returned: dict[str, str] = {}
        self._gathered: list[bytes] = []
        self._gathered_bytes = 0
        channel.events["basic_ack"].add(self._on_ack)
        channel.events["basic_nack"].add(self._on_nack)
        channel.events["basic_return"].add(self._on_return)

    def begin(self, flight: Flight, control: Control) -> None:
        """Give what the broker says from now on to `flight`."""
        self.heard_at = monotonic()
        self._flight = flight
        self._control = control

    def gather(self, message: WireMessage, *, exchange: str, routing_key: str) -> None:
        """Add the head of the flight to what is sent with the next `flush`."""
        channel, frame_max = self._channel, self._channel.connection.frame_max
        frames = publish(channel.channel_id, exchange, routing_key, message.properties, message.body, frame_max=frame_max)
        self._tag += 1
        self._unconfirmed[self._tag] = self._flight.sent(len(frames))
        self._gathered.append(frames)
        self._gathered_bytes += len(frames)

    @property
    def full(self) -> bool:
        """Tell whether what has gathered should be flushed."""
        return len(self._gathered) >= BURST_MESSAGES or self._gathered_bytes >= BURST_BYTES

    def flush(self) -> None:
        """Put what has gathered on the wire; give it back to the flight if nothing more may be sent."""
        gathered, self._gathered, self._gathered_bytes = self._gathered, [], 0
        if not gathered:
            return
        if not self._control.may_send():
            for _ in gathered:
                self._flight.recall(self._unconfirmed.pop(self._tag))
                self._tag -= 1
            return
        connection = self._channel.connection
        connection.transport.write(b"".join(gathered))
        connection.bytes_sent += 1  # py-amqp's count of writes: without one it sends a heartbeat

    def _on_ack(self, tag: int, multiple: bool) -> None:  # noqa: FBT001 - py-amqp's signature
        for row in self._take(tag, multiple=multiple):
            reason = self._returned.pop(str(row.message_id), None) if self._returned else None
            self._flight.answered(row, Verdict(Outcome.REJECTED, reason, UNROUTABLE) if reason else CONFIRMED)

    def _on_nack(self, tag: int, multiple: bool) -> None:  # noqa: FBT001 - py-amqp's signature
        for row in self._take(tag, multiple=multiple):
            self._flight.answered(row, REFUSED)

    def _on_return(self, error: Any, exchange: str, routing_key: str, message: amqp.Message) -> None:
        reason = f"broker: unroutable ({error.reply_text}): no queue is bound to exchange {exchange!r} for {routing_key!r}"
        self._returned[message.properties["message_id"]] = reason

    def _take(self, tag: int, *, multiple: bool) -> list[Outgoing]:
        self.heard_at = monotonic()
        self._control.progress()
        if not multiple:
            row = self._unconfirmed.pop(tag, None)
            return [] if row is None else [row]
        tags = [known for known in self._unconfirmed if known <= tag]
        return [self._unconfirmed.pop(known) for known in tags]
