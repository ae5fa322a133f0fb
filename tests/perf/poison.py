"""What poison costs the good: messages that cannot be published, among ten times as many that can.

A third of the poison is unroutable without a key, a third unroutable with a key of its own, and a third has headers that no
frame can carry, written by SQL past the checks of `enqueue`. The rate is that of the good ones, from their commit until
all have arrived in a quorum queue.
"""

import json
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import amqp
import sqlalchemy as sa

from outbox.identity import new_message_id, partition_of
from outbox.migrations import LATEST
from outbox.migrations.sql import apply
from outbox.tables import DEFAULT
from tests.faults import processes
from tests.faults.processes import Program
from tests.servers.postgres import Postgres
from tests.servers.rabbitmq import RabbitMQ

GOOD, POISON = 100_000, 10_000
KEYS = 1000
QUEUE = "bench"
TIMEOUT_S = 600
PAYLOAD = b'{"text": "' + b"x" * 240 + b'"}'

KINDS: tuple[Callable[[int], dict[str, Any]], ...] = (
    lambda _number: {"topic": "nobody.listens", "key": None},
    lambda number: {"topic": "nobody.listens", "key": f"poison-{number}"},
    lambda _number: {"topic": "good.one", "key": None, "headers": {"large": "x" * 131_072}},
)


def run(*, pairs: int) -> dict[str, Any]:
    """Publish the good ones alone and among poison, alternating, each time from a new database."""
    rates: dict[str, list[float]] = {"good_only": [], "with_poison": []}
    with Postgres() as postgres, RabbitMQ() as broker, client(broker.port) as channel:
        channel.exchange_declare("outbox", "topic", durable=True, auto_delete=False)
        channel.queue_declare(QUEUE, durable=True, auto_delete=False, arguments={"x-queue-type": "quorum"})
        channel.queue_bind(QUEUE, "outbox", "good.#")
        for _ in range(pairs):
            rates["good_only"].append(_rate(postgres, broker, channel, poison=0))
            rates["with_poison"].append(_rate(postgres, broker, channel, poison=POISON))
    good_only, with_poison = (statistics.median(each) for each in rates.values())
    return {
        "good_only_per_s": round(good_only, 1),
        "with_poison_per_s": round(with_poison, 1),
        "ratio": round(with_poison / good_only, 2),
    }


def _rate(postgres: Postgres, broker: RabbitMQ, channel: amqp.Channel, *, poison: int) -> float:
    """Return how many good ones arrived in a second."""
    url = postgres.create_database()
    engine = sa.create_engine(url, poolclass=sa.NullPool)
    with engine.begin() as connection:
        apply(connection, range(1, LATEST + 1))
    with processes.relay("relay", url, broker.url) as relay:
        relay.wait_until_ready()
        with engine.begin() as connection:
            _insert(connection, _rows(poison))
            began = time.perf_counter()
        _wait_until_arrived(channel, relay)
        seconds = time.perf_counter() - began
        if relay.terminate() != 0:
            raise RuntimeError(f"the relay failed:\n{relay.log}")
    _check(engine, channel, poison)
    postgres.drop_database(url)
    return GOOD / seconds


def _rows(poison: int) -> Iterator[dict[str, Any]]:
    """Good ones, with the poison spread evenly among them."""
    every = GOOD // poison if poison else GOOD + 1
    for number in range(GOOD):
        yield {"topic": "good.one", "key": f"key-{number % KEYS}", "headers": {}}
        if number % every == every - 1:
            yield {"headers": {}} | KINDS[number // every % len(KINDS)](number)


def _insert(connection: sa.Connection, rows: Iterator[dict[str, Any]]) -> None:
    columns = "message_id, topic, key, partition, type, content_type, payload, headers"
    cursor = connection.connection.cursor()
    with cursor.copy(f"COPY outbox_message ({columns}) FROM STDIN") as copy:
        for row in rows:
            key, headers = row["key"], json.dumps(row["headers"])
            copy.write_row(
                (new_message_id(), row["topic"], key, partition_of(key), "bench", "application/json", PAYLOAD, headers)
            )


def _wait_until_arrived(channel: amqp.Channel, relay: Program) -> None:
    deadline = time.monotonic() + TIMEOUT_S
    while _arrived(channel) < GOOD:
        if relay.process.poll() is not None or time.monotonic() > deadline:
            raise RuntimeError(f"the relay does not go on:\n{relay.log}")
        time.sleep(0.02)


def _check(engine: sa.Engine, channel: amqp.Channel, poison: int) -> None:
    """A run that lost or doubled anything, or let poison out, has no speed. Empties the queue."""
    left = sa.select(sa.func.count()).select_from(DEFAULT.message)
    with engine.connect() as connection:
        rows, failed = connection.execute(
            sa.select(left.scalar_subquery(), left.where(DEFAULT.message.c.attempts > 0).scalar_subquery())
        ).one()
    arrived = channel.queue_purge(QUEUE)
    if (arrived, rows, failed) != (GOOD, poison, poison):
        raise RuntimeError(f"{arrived} arrived of {GOOD}; {rows} are left, {failed} of them failed, where {poison} are poison")


def _arrived(channel: amqp.Channel) -> int:
    return int(channel.queue_declare(QUEUE, passive=True).message_count)


@contextmanager
def client(port: int) -> Iterator[amqp.Channel]:
    """A plain client of the broker."""
    with amqp.Connection(f"127.0.0.1:{port}") as connection:
        yield connection.channel()
