"""What waits must not slow what is delivered: a drain on an otherwise empty table against the same beside everything that can wait.

Beside it are scheduled messages, messages blocked behind one dead one of their key, dead ones, and a session that has held a
snapshot open since before the fresh ones were written, so that vacuum removes nothing of what is published. The rate is from
their commit until all are in a quorum queue. The buffers are those of a claim that reads a thousand messages after the fresh ones have been
published, and the most that a claim took on the way there: on the clean table, `beside` what waits, and `loaded` with the snapshot too.

`OUTBOX_PERF_MESSAGES`, `_SCHEDULED`, `_BLOCKED` and `_DEAD` say how many (default: 100,000 beside 1,000,000, 100,000, 100,000).
"""

import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import amqp
import sqlalchemy as sa

from outbox.tables import DEFAULT
from tests.perf.parts import buffers
from tests.perf.parts.broker import TIMEOUT_S, bench_queue, take_all, waiting
from tests.perf.parts.database import autocommit, count, insert_fresh, prepared, settings, url_of
from tests.perf.parts.relaying import new_relay, require_alive, stop
from tests.perf.parts.sizes import size
from tests.servers.postgres import Postgres
from tests.servers.rabbitmq import RabbitMQ

MESSAGES = size("MESSAGES", 100_000)
SCHEDULED, BLOCKED, DEAD = size("SCHEDULED", 1_000_000), size("BLOCKED", 100_000), size("DEAD", 100_000)
NUMBERS = range(1, MESSAGES + 1)

_INSERT = """
INSERT INTO outbox_message
       (message_id, topic, key, partition, type, content_type, payload, state, available_at, holds, dead_at, attempts, last_error)
SELECT gen_random_uuid(), 'bench.waiting', {key}, {partition}, 'bench', 'application/json', convert_to(repeat('x', 240), 'utf8'),
       {state}, now() + {due}, {holds}, {dead_at}, 1, 'it was unroutable'
FROM generate_series(1, CAST(:rows AS bigint)) AS n
"""
_DEAD = {"state": "'dead'", "due": "interval '0'", "holds": "true", "dead_at": "now()"}
_LOAD = (
    ({"key": "'stuck'", "partition": "7", **_DEAD}, 1),
    ({"key": "'stuck'", "partition": "7", **_DEAD, "state": "'blocked'", "dead_at": "NULL"}, BLOCKED),
    ({"key": "'dead-' || n", "partition": "n % 64", **_DEAD}, DEAD),
    (
        {
            "key": "'later-' || n",
            "partition": "n % 64",
            "state": "'scheduled'",
            "due": "interval '300 days' + n * interval '1 second'",
            "holds": "false",
            "dead_at": "NULL",
        },
        SCHEDULED,
    ),
)
LOADED = sum(rows for _, rows in _LOAD)


def run(*, pairs: int) -> dict[str, Any]:
    """Drain either table, alternating; then read what a claim costs in either."""
    with Postgres() as postgres, RabbitMQ() as broker, bench_queue(broker.port) as channel:
        clean, loaded = prepared(postgres), prepared(postgres)
        _load(loaded)
        rates: dict[str, list[float]] = {"clean": [], "loaded": []}
        for _ in range(pairs):
            for engine in (clean, loaded):
                autocommit(engine, "VACUUM ANALYZE outbox_message", "CHECKPOINT")
            rates["clean"].append(_drain(clean, broker, channel))
            with _snapshot(loaded):
                rates["loaded"].append(_drain(loaded, broker, channel))
        for engine in (clean, loaded):
            autocommit(engine, "VACUUM outbox_message")
        clean_cost, beside_cost = _cost(clean), _cost(loaded)
        with _snapshot(loaded):
            loaded_cost = _cost(loaded)
        _check(clean, left=0)
        _check(loaded, left=LOADED)
        about = settings(clean)
        for engine in (clean, loaded):
            engine.dispose()
    clean_per_s, loaded_per_s = (statistics.median(each) for each in rates.values())
    return {
        **about,
        "messages": MESSAGES,
        "waiting": LOADED,
        "clean_per_s": round(clean_per_s, 1),
        "loaded_per_s": round(loaded_per_s, 1),
        "ratio": round(loaded_per_s / clean_per_s, 3),
        "claim_buffers_clean": clean_cost.settled,
        "claim_buffers_beside": beside_cost.settled,
        "claim_buffers_loaded": loaded_cost.settled,
        "claim_buffers_growth_beside": round(beside_cost.settled / clean_cost.settled, 2),
        "claim_buffers_growth": round(loaded_cost.settled / clean_cost.settled, 2),
        "claim_buffers_clean_worst": clean_cost.worst,
        "claim_buffers_beside_worst": beside_cost.worst,
        "claim_buffers_loaded_worst": loaded_cost.worst,
    }


def _load(engine: sa.Engine) -> None:
    with engine.begin() as connection:
        for values, rows in _LOAD:
            connection.execute(sa.text(_INSERT.format(**values)), {"rows": rows})


@contextmanager
def _snapshot(engine: sa.Engine) -> Iterator[None]:
    """Hold a snapshot open. Raises if it was not the same one to the end."""
    rows = sa.select(sa.func.count(), sa.func.max(DEFAULT.message.c.id)).select_from(DEFAULT.message)
    with engine.connect().execution_options(isolation_level="REPEATABLE READ") as connection:
        seen = connection.execute(rows).one()
        yield
        if connection.execute(rows).one() != seen:
            raise RuntimeError("the snapshot was not held")


def _drain(engine: sa.Engine, broker: RabbitMQ, channel: amqp.Channel) -> float:
    """Return how many of the fresh ones arrived in a second."""
    with new_relay("relay", url_of(engine), broker.url) as program:
        program.wait_until_ready()
        insert_fresh(engine, NUMBERS)
        began = time.perf_counter()
        while waiting(channel) < MESSAGES:
            require_alive(program)
            if time.perf_counter() - began > TIMEOUT_S:
                raise RuntimeError(f"the relay does not go on:\n{program.log}")
            time.sleep(0.02)
        seconds = time.perf_counter() - began
        stop(program)
    take_all(channel, set(NUMBERS))
    return MESSAGES / seconds


def _cost(engine: sa.Engine) -> buffers.Cost:
    insert_fresh(engine, NUMBERS)
    return buffers.drain(engine, MESSAGES, again=lambda: insert_fresh(engine, range(1, buffers.BATCH + 1)))


def _check(engine: sa.Engine, *, left: int) -> None:
    """What moved, published or lost anything else has no speed."""
    found = count(engine)
    if found != left:
        raise RuntimeError(f"{left} messages were to be left and {found} are")
