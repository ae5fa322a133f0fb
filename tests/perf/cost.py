"""What a message costs in steady state: statements, write-ahead log, row writes, and processor time of relay and database.

`OUTBOX_PERF_ROWS` says how many messages are relayed (default: 100,000), `OUTBOX_PERF_BATCH` how many at once (default: 500), with
1,000 keys; sent ones are deleted. A relay that is at work already is given all of them by one commit; what is counted begins
before that commit and ends when the last has arrived and is settled. Statements are counted by the server (pg_stat_statements),
every BEGIN, COMMIT and setting among them; `queries` are those that read or write a table. The log includes what vacuum writes.
"""

import statistics
import time
from dataclasses import asdict, dataclass, fields
from typing import Any

from tests.faults.processes import Program
from tests.perf.parts import backlog
from tests.perf.parts.counters import Observer, Statement
from tests.perf.parts.queue import Queue, queue
from tests.perf.parts.relaying import relay, seconds_until
from tests.perf.parts.servers import about, preload, servers
from tests.perf.parts.sizes import size
from tests.perf.parts.usage import cpu_s, family_cpu_s
from tests.servers.postgres import Postgres

ROWS = size("ROWS", 100_000)
BATCH = size("BATCH", 500)
_READS_OR_WRITES = ("SELECT", "INSERT", "UPDATE", "DELETE", "WITH")


@dataclass(frozen=True)
class Cost:
    """Of one message; times in microseconds."""

    statements: float
    queries: float
    wal_bytes: float
    rows_written: float
    lease_rows_written: float
    relay_cpu_us: float
    database_cpu_us: float


def run(*, pairs: int) -> dict[str, Any]:
    """Relay the same backlog several times, each in a new database."""
    with servers() as (postgres, broker), queue(broker.port) as arriving:
        if not preload(postgres, "pg_stat_statements"):
            raise RuntimeError("pg_stat_statements is not installed here; it comes with postgresql-contrib")
        costs = [_cost(postgres, broker.url, arriving) for _ in range(pairs)]
        told = about(postgres, broker)
    medians = {field.name: statistics.median(asdict(cost)[field.name] for cost in costs) for field in fields(Cost)}
    return {
        "rows": ROWS,
        "batch_size": BATCH,
        "payload_bytes": backlog.PAYLOAD_BYTES,
        **told,
        **{name: round(value, 4 if value < 10 else 1) for name, value in medians.items()},
    }


def _cost(postgres: Postgres, broker_url: str, arriving: Queue) -> Cost:
    with backlog.database(postgres) as url:
        observer = Observer(url)
        with relay(url, broker_url, "--batch-size", str(BATCH)) as program:
            cost = _measured(postgres, url, observer, arriving, program)
        rows, leases = _written(observer)
        if left := backlog.left(url):
            raise RuntimeError(f"{left} messages are left in the table")
    arriving.check(ROWS)
    return Cost(**cost, rows_written=(rows - ROWS) / ROWS, lease_rows_written=leases / ROWS)


def _measured(postgres: Postgres, url: str, observer: Observer, arriving: Queue, program: Program) -> dict[str, float]:
    server, relaying = _pid(postgres), program.process.pid
    observer.checkpoint()  # pages that are written for the first time after one are logged as a whole
    with backlog.filling(url, ROWS):
        before = (cpu_s(relaying), family_cpu_s(server), observer.wal_bytes())
        observer.count_statements()
    seconds_until(arriving, ROWS, program)
    _wait_until_settled(url)
    relay_s, server_s, wal_bytes = cpu_s(relaying), family_cpu_s(server), observer.wal_bytes()
    counted = observer.statements()
    return {
        "statements": _calls(counted) / ROWS,
        "queries": _calls([each for each in counted if _is_query(each.text)]) / ROWS,
        "wal_bytes": (wal_bytes - before[2]) / ROWS,
        "relay_cpu_us": (relay_s - before[0]) / ROWS * 1e6,
        "database_cpu_us": (server_s - before[1]) / ROWS * 1e6,
    }


def _wait_until_settled(url: str) -> None:
    deadline = time.monotonic() + 60
    while backlog.left(url):
        if time.monotonic() > deadline:
            raise RuntimeError("what has arrived is not settled")


def _written(observer: Observer) -> tuple[int, int]:
    """Return how many rows were written, once those who wrote them have reported."""
    with observer.alone():
        return observer.rows_written("outbox_message"), observer.rows_written("outbox_partition")


def _is_query(text: str) -> bool:
    return text.lstrip().upper().startswith(_READS_OR_WRITES) and not text.startswith("SELECT concat(set_config(")


def _calls(counted: list[Statement]) -> int:
    return sum(each.calls for each in counted)


def _pid(postgres: Postgres) -> int:
    return int((postgres.folder / "data" / "postmaster.pid").read_text().splitlines()[0])
