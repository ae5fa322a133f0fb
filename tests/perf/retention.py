"""What cleaning up costs when millions of sent messages are due: seconds per batch, and what a claim waits meanwhile.

`OUTBOX_PERF_ROWS` says how many messages are due (default: a million).
"""

import os
import statistics
import threading
import time
from typing import Any

import sqlalchemy as sa

from outbox.migrations import LATEST
from outbox.migrations.sql import apply
from outbox.policies import Policies
from outbox.publishers.flight import CONFIRMED
from outbox.relay.cleanup import BATCH
from outbox.relay.transactions import Transactions
from outbox.store import retention
from outbox.store.engine import open_engine
from outbox.tables import DEFAULT
from tests.servers.postgres import Postgres

ROWS = int(os.environ.get("OUTBOX_PERF_ROWS", "1000000"))
CLAIMS, PENDING = 30, 200
RETENTION_S = 7 * 86_400.0


class Cleaner:
    """Deletes batch after batch, as the relays do, and notes how long each took; less than full ends it."""

    def __init__(self, engine: sa.Engine) -> None:
        self._engine = engine
        self._since: Any = None
        self.seconds: list[float] = []
        self._finished = False

    def batch(self) -> None:
        began = time.perf_counter()
        with self._engine.begin() as connection:
            assert retention.try_lock(connection, DEFAULT)
            deleted = retention.expire_sent(connection, DEFAULT, older_than_s=RETENTION_S, since=self._since, most=BATCH)
        self.seconds.append(time.perf_counter() - began)
        self._since = deleted.last
        self._finished = deleted.count < BATCH

    def batches(self, most: int) -> None:
        while most > 0 and not self._finished:
            self.batch()
            most -= 1


def run(*, pairs: int) -> dict[str, Any]:
    """Claim and settle with and without a clean-up beside it, alternating; then clean up to the end."""
    with Postgres() as server:
        engine = open_engine(server.create_database(), pool_size=4)
        with engine.begin() as connection:
            apply(connection, range(1, LATEST + 1))
        _fill(engine)
        relay = Transactions(engine, DEFAULT, owner="relay", lease_s=30, batch_size=PENDING, policies=Policies(), keep_sent=True)
        cleaner = Cleaner(engine)
        each = ROWS // BATCH // 2 // pairs  # half of them beside the claims, the rest alone
        alone: list[float] = []
        beside: list[float] = []
        _claim(engine, relay)  # warm up
        for _ in range(pairs):
            alone += [_claim(engine, relay) for _ in range(CLAIMS)]
            thread = threading.Thread(target=cleaner.batches, args=(each,))
            thread.start()
            while thread.is_alive():
                beside.append(_claim(engine, relay))
            thread.join()
        shared = len(cleaner.seconds)
        began = time.perf_counter()
        cleaner.batches(ROWS)
        took_s = time.perf_counter() - began
        _check(engine, kept=(1 + len(alone) + len(beside)) * PENDING)
        engine.dispose()
    own = cleaner.seconds[shared:-1]
    tenth = max(1, len(own) // 10)
    return {
        "rows": ROWS,
        "claim_alone_p50_ms": _ms(alone),
        "claim_beside_p50_ms": _ms(beside),
        "batch_beside_p50_ms": _ms(cleaner.seconds[:shared]),
        "batch_p50_ms": _ms(own),
        "batch_max_ms": round(max(own) * 1000, 1),
        "batch_first_tenth_ms": _ms(own[:tenth]),
        "batch_last_tenth_ms": _ms(own[-tenth:]),
        "deleted_per_s": round(len(own) * BATCH / took_s),
    }


def _fill(engine: sa.Engine) -> None:
    insert = sa.text(
        "INSERT INTO outbox_message (message_id, topic, key, partition, type, content_type, payload, state, sent_at)"
        " SELECT gen_random_uuid(), 'orders.placed', 'k' || n % 1000, n % 64, 't', 'application/json', convert_to(repeat('x', 240), 'utf8'),"
        " 'sent', now() - interval '30 days' + n * interval '1 millisecond' FROM generate_series(1, :rows) AS n"
    )
    with engine.begin() as connection:
        connection.execute(insert, {"rows": ROWS})
    _autocommit(engine, "VACUUM ANALYZE outbox_message")
    _autocommit(engine, "CHECKPOINT")


def _claim(engine: sa.Engine, relay: Transactions) -> float:
    """Insert, claim and settle some messages; return how long the claim took."""
    pending = sa.text(
        "INSERT INTO outbox_message (message_id, topic, partition, type, content_type, payload)"
        " SELECT gen_random_uuid(), 'orders.placed', n % 16, 't', 'application/json', convert_to(repeat('x', 240), 'utf8')"
        " FROM generate_series(1, :rows) AS n"
    )
    with engine.begin() as connection:
        connection.execute(pending, {"rows": PENDING})
    began = time.perf_counter()
    batch = relay.claim()
    took_s = time.perf_counter() - began
    while batch is not None:
        relay.settle(batch, {row.id: CONFIRMED for row in batch.rows})
        batch = relay.claim()
    return took_s


def _check(engine: sa.Engine, *, kept: int) -> None:
    """A clean-up that left or took anything else has no speed."""
    with engine.connect() as connection:
        found = connection.execute(sa.select(sa.func.count()).select_from(DEFAULT.message)).scalar_one()
    if found != kept:
        raise RuntimeError(f"{kept} messages were to be kept and {found} are there")


def _autocommit(engine: sa.Engine, statement: str) -> None:
    with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        connection.execute(sa.text(statement))


def _ms(seconds: list[float]) -> float:
    return round(statistics.median(seconds) * 1000, 1)
