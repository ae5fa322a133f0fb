"""How fast a relay drains a backlog, against the same publisher fed from memory, and against waiting for each confirm.

`OUTBOX_PERF_ROWS` says how many messages a run has (default: 100,000), with 1,000 keys; a tenth of them when each confirm is
waited for. The relay's time runs from the commit of the backlog until all of it has arrived in a quorum queue.
"""

import statistics
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from typing import Any

import kombu

from outbox.identity import new_message_id, partition_of
from outbox.outgoing import Outgoing
from outbox.publishers.base import Steady
from outbox.publishers.rabbitmq import RabbitMQPublisher
from outbox.routes import Routes
from outbox.states import Outcome
from tests.perf.parts import backlog
from tests.perf.parts.queue import EXCHANGE, Queue, queue
from tests.perf.parts.relaying import relay, seconds_until
from tests.perf.parts.servers import about, servers
from tests.perf.parts.sizes import size
from tests.servers.postgres import Postgres

ROWS = size("ROWS", 100_000)
CONFIRM_EACH = max(1, ROWS // 10)
BATCH = 1000
"""The relay's own default."""


def run(*, pairs: int) -> dict[str, Any]:
    """Publish in the three ways, alternating; what has arrived is received and counted after each."""
    with servers() as (postgres, broker), queue(broker.port) as arriving:
        ways: dict[str, Callable[[], float]] = {
            "relay": lambda: _relay(postgres, broker.url, arriving),
            "publish_only": lambda: _publish_only(broker.url, arriving),
            "confirm_each": lambda: _confirm_each(broker.url, arriving),
        }
        rates: dict[str, list[float]] = {name: [] for name in ways}
        for _ in range(pairs):
            for name, way in ways.items():
                rates[name].append(way())
        told = about(postgres, broker)
    relay_s, publish_only_s, confirm_each_s = (statistics.median(each) for each in rates.values())
    return {
        "rows": ROWS,
        "payload_bytes": backlog.PAYLOAD_BYTES,
        "batch_size": BATCH,
        **told,
        "relay_per_s": round(relay_s, 1),
        "publish_only_per_s": round(publish_only_s, 1),
        "confirm_each_per_s": round(confirm_each_s, 1),
        "ratio_to_publish_only": round(relay_s / publish_only_s, 2),
        "ratio_to_confirm_each": round(relay_s / confirm_each_s, 2),
    }


def _relay(postgres: Postgres, broker_url: str, arriving: Queue) -> float:
    with backlog.database(postgres) as url:
        with relay(url, broker_url, "--batch-size", str(BATCH)) as program:
            with backlog.filling(url, ROWS):
                pass
            seconds = seconds_until(arriving, ROWS, program)
        if left := backlog.left(url):
            raise RuntimeError(f"{left} messages are left in the table")
    arriving.check(ROWS)
    return ROWS / seconds


def _publish_only(broker_url: str, arriving: Queue) -> float:
    rows = [_row(number) for number in range(ROWS)]
    publisher = RabbitMQPublisher(broker_url, Routes())
    publisher.connect()
    began = time.perf_counter()
    for first in range(0, ROWS, BATCH):
        _publish(publisher, rows[first : first + BATCH])
    seconds = time.perf_counter() - began
    publisher.close()
    arriving.wait_until(ROWS)
    arriving.check(ROWS)
    return ROWS / seconds


def _publish(publisher: RabbitMQPublisher, rows: Sequence[Outgoing]) -> None:
    verdicts = publisher.publish(rows, Steady()).verdicts
    if any(verdicts[row.id].outcome is not Outcome.CONFIRMED for row in rows):
        raise RuntimeError("not everything was confirmed")


def _confirm_each(broker_url: str, arriving: Queue) -> float:
    bodies = [backlog.payload(number) for number in range(CONFIRM_EACH)]
    with kombu.Connection(broker_url, transport_options={"confirm_publish": True}) as connection:
        producer = connection.Producer()
        began = time.perf_counter()
        for body in bodies:
            producer.publish(
                body,
                exchange=EXCHANGE,
                routing_key=backlog.TOPIC,
                content_type="application/json",
                content_encoding="utf-8",
                delivery_mode=2,
                mandatory=True,
                message_id=str(new_message_id()),
            )
        seconds = time.perf_counter() - began
    arriving.wait_until(CONFIRM_EACH)
    arriving.check(CONFIRM_EACH)
    return CONFIRM_EACH / seconds


def _row(number: int) -> Outgoing:
    key = backlog.a_thousand_keys(number)
    return Outgoing(
        id=number,
        message_id=new_message_id(),
        topic=backlog.TOPIC,
        key=key,
        partition=partition_of(key),
        type="bench",
        content_type="application/json",
        payload=backlog.payload(number),
        headers={},
        created_at=datetime.now(UTC),
        age_s=0.0,
        attempts=0,
        held_id=None,
    )
