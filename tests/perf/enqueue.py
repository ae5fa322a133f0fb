"""What an event costs a business transaction: one more row in it, against one more plain row, and then with each kind of wake-up.

The transaction locks and debits an account and writes an order. The plain row has the same content as the event, an id from
the database, and one index besides. Writers are processes. `ratio_to_plain_insert` is that of events to plain rows, per number of
writers; `ratio_with_wakeup` and `ratio_with_notify` are those of events with a wake-up to events without, with somebody who listens.
In bulk: `enqueue_many` on a connection, ten thousand events in one transaction, against COPY of the same rows.

`OUTBOX_PERF_TRANSACTIONS` (default: 4,000) in each run, `OUTBOX_PERF_BULK` (default: 10,000) events.
"""

import json
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import sqlalchemy as sa

import outbox
from outbox.enqueueing import enqueue_many
from outbox.identity import new_message_id, partition_of
from outbox.tables import DEFAULT
from tests.perf.measure import alternate
from tests.perf.parts import waking
from tests.perf.parts.broker import TOPIC
from tests.perf.parts.database import count, prepared, settings, url_of
from tests.perf.parts.ordering import Journal, Order, create, make_orderer
from tests.perf.parts.sizes import size
from tests.perf.parts.team import Team
from tests.servers.postgres import Postgres

TRANSACTIONS, BULK = size("TRANSACTIONS", 4000), size("BULK", 10_000)
WRITERS = (1, 4, 16)
RATIOS = {
    "ratio_to_plain_insert": ("outbox", "plain"),
    "ratio_with_wakeup": ("wakeup", "outbox"),
    "ratio_with_notify": ("notify", "outbox"),
}


def run(*, pairs: int, wake: bool) -> dict[str, Any]:
    """Commit transactions of every kind, alternating, with more and more writers."""
    udp = waking.new_address()
    addresses = {"outbox": None, "wakeup": udp, "notify": "postgres"} if wake else {"outbox": None}
    with Postgres() as postgres:
        engine = prepared(postgres)
        create(engine)
        results: dict[str, Any] = {**settings(engine), "transactions": TRANSACTIONS}
        with waking.listening(engine, udp):
            for writers in WRITERS:
                results |= _of(engine, addresses, writers=writers, pairs=pairs)
        results |= _bulk(engine, pairs=pairs)
        engine.dispose()
    return results


def _of(engine: sa.Engine, addresses: Mapping[str, str | None], *, writers: int, pairs: int) -> dict[str, Any]:
    each = -(-TRANSACTIONS // writers)
    before = _written(engine)
    kinds = ("plain", *addresses)
    with Team(writers, make_orderer, url_of(engine), addresses) as team:
        ways = {kind: partial(_together, team, kind, each) for kind in kinds}
        alternate(ways, pairs=1)  # warm up
        rates = alternate(ways, pairs=pairs)
    # A run that lost or doubled anything has no speed.
    committed = each * writers * (pairs + 1)
    written = tuple(now - then for now, then in zip(_written(engine), before, strict=True))
    if written != (committed * len(kinds), committed, committed * len(addresses)):
        raise RuntimeError(f"orders, plain rows and events: {written} for {committed} transactions of each of {kinds}")
    results: dict[str, Any] = {f"{kind}_per_s_at_{writers}": rate for kind, rate in rates.items()}
    for name, (kind, base) in RATIOS.items():
        if kind in rates:
            ratio = round(rates[kind] / rates[base], 3)
            results |= {f"{name}_at_{writers}": ratio, name: ratio}  # the name alone: that of the most writers, which come last
    return results


def _together(team: Team, kind: str, each: int) -> int:
    team.order(lambda _place: (kind, each))
    return sum(team.answers())


def _written(engine: sa.Engine) -> tuple[int, int, int]:
    """Return how many orders, plain rows and events there are."""
    tables = (Order.__table__, Journal.__table__, DEFAULT.message)
    orders, plain, events = (count(engine, table=table) for table in tables)
    return orders, plain, events


def _bulk(engine: sa.Engine, *, pairs: int) -> dict[str, Any]:
    before = count(engine)
    ways = {"enqueue_many": partial(_enqueue_many, engine), "copy": partial(_copy, engine)}
    alternate(ways, pairs=1)
    rates = alternate(ways, pairs=pairs)
    if count(engine) - before != 2 * BULK * (pairs + 1):
        raise RuntimeError("not every event of a bulk was written")
    return {
        "enqueue_many_per_s": rates["enqueue_many"],
        "copy_per_s": rates["copy"],
        "ratio_to_copy": round(rates["enqueue_many"] / rates["copy"], 3),
    }


def _contents() -> Iterator[tuple[str, dict[str, Any]]]:
    for number in range(BULK):
        yield f"key-{number % 1000}", {"number": number, "text": "x" * 200}


def _enqueue_many(engine: sa.Engine) -> int:
    with engine.begin() as connection:
        events = (outbox.Event(topic=TOPIC, payload=content, key=key) for key, content in _contents())
        return len(enqueue_many(connection, events))


def _copy(engine: sa.Engine) -> int:
    columns = "message_id, topic, key, partition, type, content_type, payload, headers, schema_version"
    with engine.begin() as connection:
        cursor = connection.connection.cursor()
        with cursor.copy(f"COPY outbox_message ({columns}) FROM STDIN") as copy:
            for key, content in _contents():
                payload = json.dumps(content).encode()
                copy.write_row((new_message_id(), TOPIC, key, partition_of(key), TOPIC, "application/json", payload, "{}", 1))
    return BULK
