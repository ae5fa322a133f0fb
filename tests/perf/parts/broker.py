"""A quorum queue for one benchmark, and a plain client that says what has arrived in it."""

import json
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime

import amqp

from outbox.identity import new_message_id
from outbox.outgoing import Outgoing
from outbox.publishers.base import Steady
from outbox.publishers.rabbitmq import RabbitMQPublisher
from outbox.routes import Routes
from outbox.states import Outcome
from outbox.wire import DEFAULT_EXCHANGE

QUEUE = "bench"
TOPIC = "bench.one"
TIMEOUT_S = 600
_MOST_AHEAD = 500
_QUIET_S = 0.5


@contextmanager
def bench_queue(port: int) -> Iterator[amqp.Channel]:
    """Declare the queue, bound to all topics of the benchmarks, and give a channel."""
    with amqp.Connection(f"127.0.0.1:{port}") as connection:
        channel = connection.channel()
        channel.exchange_declare(DEFAULT_EXCHANGE, "topic", durable=True, auto_delete=False)
        channel.queue_declare(QUEUE, durable=True, auto_delete=False, arguments={"x-queue-type": "quorum"})
        channel.queue_bind(QUEUE, DEFAULT_EXCHANGE, "bench.#")
        yield channel


def waiting(channel: amqp.Channel) -> int:
    """Return how many messages are in the queue."""
    return int(channel.queue_declare(QUEUE, passive=True).message_count)


class Arrivals:
    """Takes messages from the queue and notes, on the machine's monotonic clock, when each first came, and how often.

    Each message is known by the `number` in its JSON body.
    """

    def __init__(self, channel: amqp.Channel) -> None:
        self._channel = channel
        self.first_ns: dict[int, int] = {}
        self.times: Counter[int] = Counter()
        channel.basic_qos(0, _MOST_AHEAD, a_global=False)
        self._tag = channel.basic_consume(QUEUE, callback=self._arrive)

    def until(
        self, enough: Callable[[], bool], *, timeout_s: float = TIMEOUT_S, alive: Callable[[], None] = lambda: None
    ) -> None:
        """Take messages until it is enough. `alive` is called now and then, and raises if no more can be expected."""
        deadline = time.monotonic() + timeout_s
        while not enough():
            try:
                self._channel.connection.drain_events(timeout=0.2)
            except TimeoutError:
                alive()
                if time.monotonic() > deadline:
                    raise RuntimeError(f"only {len(self.first_ns)} messages have arrived in {timeout_s:g} s") from None

    def close(self) -> None:
        """Take what still comes, and then no more."""
        seen = -1
        while seen != (seen := self.times.total()):
            until = time.monotonic() + _QUIET_S
            self.until(lambda: time.monotonic() > until)  # noqa: B023 - called at once
        self._channel.basic_cancel(self._tag)

    def _arrive(self, message: amqp.Message) -> None:
        now_ns = time.monotonic_ns()
        number = json.loads(message.body)["number"]
        self.first_ns.setdefault(number, now_ns)
        self.times[number] += 1
        message.channel.basic_ack(message.delivery_tag)


def take_all(channel: amqp.Channel, expected: set[int]) -> None:
    """Empty the queue. Raises unless exactly these were in it, each once: what lost or doubled anything has no speed."""
    arrivals = Arrivals(channel)
    arrivals.until(lambda: arrivals.times.total() >= len(expected), timeout_s=60)
    arrivals.close()
    check(arrivals, expected)


def check(arrivals: Arrivals, expected: set[int]) -> None:
    """Raise unless exactly these have arrived, each once."""
    lost, foreign = expected - arrivals.first_ns.keys(), arrivals.first_ns.keys() - expected
    doubled = sum(1 for times in arrivals.times.values() if times > 1)
    if lost or foreign or doubled:
        raise RuntimeError(f"of {len(expected)} messages {len(lost)} were lost and {doubled} doubled; {len(foreign)} are unknown")


def publish(url: str, numbers: range) -> None:
    """Put messages into the queue, persistent and confirmed."""
    publisher = RabbitMQPublisher(url, Routes())
    publisher.connect()
    rows = [_row(number) for number in numbers]
    published = publisher.publish(rows, Steady())
    publisher.close()
    if any(verdict.outcome is not Outcome.CONFIRMED for verdict in published.verdicts.values()):
        raise RuntimeError("not every message was confirmed")


def _row(number: int) -> Outgoing:
    return Outgoing(
        id=number,
        message_id=new_message_id(),
        topic=TOPIC,
        key=None,
        partition=0,
        type="bench",
        content_type="application/json",
        payload=json.dumps({"number": number, "text": "x" * 200}).encode(),
        headers={},
        created_at=datetime.now(UTC),
        age_s=0.0,
        attempts=0,
        held_id=None,
    )
