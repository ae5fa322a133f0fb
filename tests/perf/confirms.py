"""How much faster the pipelined publisher is than waiting for each confirm, on a quorum queue with persistent messages."""

from datetime import UTC, datetime
from typing import Any

import kombu

from outbox.identity import new_message_id
from outbox.outgoing import Outgoing
from outbox.publishers.base import Steady
from outbox.publishers.rabbitmq import RabbitMQPublisher
from outbox.routes import Route, Routes
from outbox.states import Outcome
from outbox.wire import DEFAULT_EXCHANGE
from tests.perf.measure import alternate
from tests.servers.rabbitmq import RabbitMQ

QUEUE = "bench"
BODY = b"x" * 240
PIPELINED, EACH = 5000, 1500


def run(*, pairs: int) -> dict[str, Any]:
    """Publish with our publisher and with kombu's `confirm_publish`, alternating."""
    with RabbitMQ() as broker:
        ours = RabbitMQPublisher(broker.url, Routes((Route("#", queues=[QUEUE]),)))
        ours.connect()
        with kombu.Connection(broker.url, transport_options={"confirm_publish": True}) as connection:
            producer = connection.Producer()
            ways = {"pipelined": lambda: _pipelined(ours), "confirm_each": lambda: _confirm_each(producer)}
            alternate(ways, pairs=1)  # warm up
            rates = alternate(ways, pairs=pairs)
        ours.close()
        _check(broker.url, (PIPELINED + EACH) * (pairs + 1))
    return {
        "pipelined_per_s": rates["pipelined"],
        "confirm_each_per_s": rates["confirm_each"],
        "ratio": round(rates["pipelined"] / rates["confirm_each"], 2),
    }


def _pipelined(publisher: RabbitMQPublisher) -> int:
    published = publisher.publish([_row(number) for number in range(PIPELINED)], Steady())
    assert all(verdict.outcome is Outcome.CONFIRMED for verdict in published.verdicts.values())
    return len(published.verdicts)


def _confirm_each(producer: kombu.Producer) -> int:
    for _ in range(EACH):
        producer.publish(
            BODY,
            exchange=DEFAULT_EXCHANGE,
            routing_key="bench",
            content_type="application/octet-stream",
            content_encoding="binary",
            delivery_mode=2,
            mandatory=True,
            message_id=str(new_message_id()),
        )
    return EACH


def _check(url: str, expected: int) -> None:
    """A run that lost or doubled anything has no speed."""
    with kombu.Connection(url) as connection:
        arrived = connection.channel().queue_declare(QUEUE, passive=True).message_count
    if arrived != expected:
        raise RuntimeError(f"{expected} messages were published and {arrived} arrived")


def _row(number: int) -> Outgoing:
    return Outgoing(
        id=number,
        message_id=new_message_id(),
        topic="bench",
        key=None,
        partition=0,
        type="bench",
        content_type="application/octet-stream",
        payload=BODY,
        headers={},
        created_at=datetime.now(UTC),
        age_s=0.0,
        attempts=0,
        held_id=None,
    )
