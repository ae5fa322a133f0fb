"""What the inbox costs a consumer: its rate with the record of each message, against the same consumer without it.

The effect of a message is one INSERT; the rate is that of the effects, from the first to the last, by the database's clock, with all
messages in the queue before the consumer starts. `outbox-consume` handles one message in a transaction: `transactional` against
`idempotent`. It has no mode that handles several in one transaction; that takes a loop of one's own around `once`, which is
measured with one message in a transaction and with a hundred.

`OUTBOX_PERF_MESSAGES` (default: 10,000) in each run, `OUTBOX_PERF_BATCH` (default: 100) in a transaction.
"""

import os
import statistics
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import amqp
import sqlalchemy as sa

from outbox.tables import DEFAULT
from tests.faults.processes import Program
from tests.perf.parts.broker import TIMEOUT_S, bench_queue, publish, waiting
from tests.perf.parts.consumers import effect, loop, metadata
from tests.perf.parts.database import autocommit, count, prepared, settings, url_of
from tests.perf.parts.relaying import require_alive, stop
from tests.perf.parts.sizes import size
from tests.servers.postgres import Postgres
from tests.servers.rabbitmq import RabbitMQ

MESSAGES, BATCH = size("MESSAGES", 10_000), size("BATCH", 100)
WORKERS = min(4, os.cpu_count() or 1)


def run(*, pairs: int) -> dict[str, Any]:
    """Consume in every way with and without the record, alternating."""
    with Postgres() as postgres, RabbitMQ() as broker, bench_queue(broker.port) as channel:
        engine = prepared(postgres)
        metadata.create_all(engine)
        ways: Mapping[str, Callable[[bool], None]] = {
            "consume": partial(_consume, engine, broker.url, channel, 1),
            f"consume_{WORKERS}_workers": partial(_consume, engine, broker.url, channel, WORKERS),
            "loop": partial(_loop, engine, broker.port, 1),
            "loop_in_batches": partial(_loop, engine, broker.port, BATCH),
        }
        rates: dict[str, list[float]] = {f"{way}_{end}": [] for way in ways for end in ("with", "without")}
        for _ in range(pairs):
            for way, work in ways.items():
                rates[f"{way}_with"].append(_rate(engine, broker, channel, work, dedup=True))
                rates[f"{way}_without"].append(_rate(engine, broker, channel, work, dedup=False))
        about = settings(engine)
        engine.dispose()
    medians = {name: statistics.median(each) for name, each in rates.items()}
    ratios = {f"ratio_{way}": round(medians[f"{way}_with"] / medians[f"{way}_without"], 3) for way in ways}
    return {
        **about,
        "messages": MESSAGES,
        **{f"{name}_per_s": round(rate, 1) for name, rate in medians.items()},
        **ratios,
        "ratio": ratios["ratio_consume"],
    }


def _rate(engine: sa.Engine, broker: RabbitMQ, channel: amqp.Channel, work: Callable[[bool], None], *, dedup: bool) -> float:
    """Return how many effects were had in a second. Raises if there were not exactly those that there should be."""
    autocommit(engine, "TRUNCATE bench_effect, processed_messages", "CHECKPOINT")
    publish(broker.url, range(MESSAGES))
    work(dedup)
    with engine.connect() as connection:
        first, last, number, distinct = connection.execute(
            sa.select(
                sa.func.min(effect.c.at),
                sa.func.max(effect.c.at),
                sa.func.count(),
                sa.func.count(sa.distinct(effect.c.number)),
            )
        ).one()
    recorded = count(engine, table=DEFAULT.processed)
    found = (number, distinct, recorded, waiting(channel))
    if found != (MESSAGES, MESSAGES, MESSAGES if dedup else 0, 0):
        raise RuntimeError(f"effects, different ones, records and messages left: {found}, of {MESSAGES}")
    return (MESSAGES - 1) / (last - first).total_seconds()


def _consume(engine: sa.Engine, broker_url: str, channel: amqp.Channel, workers: int, dedup: bool) -> None:  # noqa: FBT001 - one of two ways
    name = "with_dedup" if dedup else "without_dedup"
    command = ("-m", "outbox.cli.consume", f"tests.perf.parts.inboxes:{name}", "--workers", str(workers))
    environment = {"OUTBOX_DATABASE_URL": url_of(engine), "OUTBOX_BROKER_URL": broker_url}
    deadline = time.monotonic() + TIMEOUT_S
    with Program(name, command, environment, ready="consuming") as program:
        program.wait_until_ready()
        while count(engine, table=effect) < MESSAGES:
            require_alive(program)
            if time.monotonic() > deadline:
                raise RuntimeError(f"the consumer does not go on:\n{program.log}")
            time.sleep(0.5)
        stop(program)


def _loop(engine: sa.Engine, port: int, at_once: int, dedup: bool) -> None:  # noqa: FBT001 - one of two ways
    with amqp.Connection(f"127.0.0.1:{port}") as connection:
        loop(engine, connection.channel(), MESSAGES, dedup=dedup, at_once=at_once)
