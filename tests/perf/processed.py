"""What recording a message in the inbox costs when ten million are recorded already, against ten thousand.

`OUTBOX_PERF_ROWS` says how many the larger one has (default: ten million). Each measured record is a transaction of its own, with
a random id: the hardest case for an index.
"""

import os
import statistics
import time
import uuid
from typing import Any

import sqlalchemy as sa
from sqlalchemy.orm import Session

from outbox.inbox import once
from outbox.migrations import LATEST
from outbox.migrations.sql import apply
from outbox.store.engine import open_engine
from outbox.tables import DEFAULT
from tests.servers.postgres import Postgres

FEW = 10_000
MANY = int(os.environ.get("OUTBOX_PERF_ROWS", "10000000"))
RECORDS = 2000


def run(*, pairs: int) -> dict[str, Any]:
    """Record messages in either table, alternating."""
    with Postgres() as server:
        few, many = (_filled(server.create_database(), rows) for rows in (FEW, MANY))
        for engine in (few, many):
            _record(engine)  # warm up
        in_few, in_many = list[float](), list[float]()
        for _ in range(pairs):
            in_few += _record(few)
            in_many += _record(many)
        _check(few, FEW + RECORDS * (pairs + 1))
        _check(many, MANY + RECORDS * (pairs + 1))
        for engine in (few, many):
            engine.dispose()
    results = {}
    for name, seconds in (("few", in_few), ("many", in_many)):
        results[f"{name}_p50_us"] = round(statistics.median(seconds) * 1e6, 1)
        results[f"{name}_p95_us"] = round(statistics.quantiles(seconds, n=20)[-1] * 1e6, 1)
    return {
        "few_rows": FEW,
        "many_rows": MANY,
        **results,
        "ratio": round(statistics.median(in_many) / statistics.median(in_few), 2),
    }


def _filled(url: str, rows: int) -> sa.Engine:
    engine = open_engine(url)
    fill = sa.text(
        "INSERT INTO processed_messages (consumer, message_id, processed_at)"
        " SELECT 'shipping', gen_random_uuid(), now() - n * interval '10 milliseconds' FROM generate_series(1, :rows) AS n"
    )
    with engine.begin() as connection:
        apply(connection, range(1, LATEST + 1))
        connection.execute(fill, {"rows": rows})
    with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        connection.execute(sa.text("VACUUM ANALYZE processed_messages"))
        connection.execute(sa.text("CHECKPOINT"))
    return engine


def _record(engine: sa.Engine) -> list[float]:
    """Return how long each `once` took, without the COMMIT, which costs the same in either."""
    taken = []
    for _ in range(RECORDS):
        message_id = str(uuid.uuid4())
        with Session(engine) as session, session.begin():
            began = time.perf_counter()
            with once(session, "shipping", message_id) as first:
                assert first
            taken.append(time.perf_counter() - began)
    return taken


def _check(engine: sa.Engine, expected: int) -> None:
    """A run that recorded anything else has no speed."""
    with engine.connect() as connection:
        found = connection.execute(sa.select(sa.func.count()).select_from(DEFAULT.processed)).scalar_one()
    if found != expected:
        raise RuntimeError(f"{expected} records were to be there and {found} are")
