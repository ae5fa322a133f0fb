"""The most memory that a relay and a consumer ever have resident: with a million messages waiting, and with large ones.

`OUTBOX_PERF_ROWS` says how many wait (default: 1,000,000), `OUTBOX_PERF_DELIVERED` how many of them are published, and then
handled, before the peaks are read (default: 50,000); `OUTBOX_PERF_LARGE` how many messages of 1 MiB there are (default: 300). All
figures are in MiB (VmHWM, as the kernel counts it), and the largest of all runs.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import sqlalchemy as sa

from tests.faults.processes import Program
from tests.perf.parts import backlog
from tests.perf.parts.consuming import effect, metadata
from tests.perf.parts.queue import TIMEOUT_S, Queue, queue
from tests.perf.parts.relaying import relay, stop
from tests.perf.parts.servers import about, servers
from tests.perf.parts.sizes import size
from tests.perf.parts.usage import peak_mib
from tests.servers.postgres import Postgres

ROWS = size("ROWS", 1_000_000)
DELIVERED = min(ROWS, size("DELIVERED", 50_000))
LARGE = size("LARGE", 300)
LARGE_BYTES = 1024 * 1024


def run(*, pairs: int) -> dict[str, Any]:
    """Relay and handle messages of either kind, alternating."""
    peaks: dict[str, list[float]] = {}
    with servers() as (postgres, broker), queue(broker.port) as arriving:
        for _ in range(pairs):
            waiting = _peaks(postgres, broker.url, arriving, rows=ROWS, delivered=DELIVERED, payload_bytes=backlog.PAYLOAD_BYTES)
            large = _peaks(postgres, broker.url, arriving, rows=LARGE, delivered=LARGE, payload_bytes=LARGE_BYTES)
            for name, pair in (("waiting", waiting), ("large", large)):
                for who, peak in zip(("relay", "consumer"), pair, strict=True):
                    peaks.setdefault(f"{who}_{name}_mib", []).append(peak)
        told = about(postgres, broker)
    largest = {name: max(each) for name, each in peaks.items()}
    return {"rows": ROWS, "delivered": DELIVERED, "large": LARGE, "large_bytes": LARGE_BYTES, **told, **largest}


def _peaks(
    postgres: Postgres, broker_url: str, arriving: Queue, *, rows: int, delivered: int, payload_bytes: int
) -> tuple[float, float]:
    """Return the peak of a relay that publishes so many of its rows or more, and that of a consumer that handles them all."""
    with backlog.database(postgres) as url:
        with backlog.filling(url, rows, payload_bytes=payload_bytes):
            pass
        with relay(url, broker_url) as program:
            arriving.wait_until(delivered, program)
            of_relay = peak_mib(program.process.pid)
        published = rows - backlog.left(url)
        arriving.wait_until(published)
        of_consumer = _handle(url, broker_url, published)
        if arriving.depth:
            raise RuntimeError("there are messages in the queue that the relay has not settled, or that nobody has handled")
    return of_relay, of_consumer


def _handle(url: str, broker_url: str, count: int) -> float:
    engine = sa.create_engine(url, poolclass=sa.NullPool)
    metadata.create_all(engine)
    with _consumer(url, broker_url) as program:
        deadline = time.monotonic() + TIMEOUT_S
        while _effects(engine)[0] < count:
            if program.process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"the consumer does not go on:\n{program.log[-4000:]}")
            time.sleep(0.1)
        peak = peak_mib(program.process.pid)
    found, different = _effects(engine)
    if not found == different == count:
        raise RuntimeError(f"{count} messages were published; there are {found} effects, of {different} messages")
    return peak


def _effects(engine: sa.Engine) -> tuple[int, int]:
    number = effect.c.number
    with engine.connect() as connection:
        found, different = connection.execute(sa.select(sa.func.count(), sa.func.count(number.distinct()))).one()
    return found, different


@contextmanager
def _consumer(database_url: str, broker_url: str) -> Iterator[Program]:
    where = {"OUTBOX_DATABASE_URL": database_url, "OUTBOX_BROKER_URL": broker_url}
    command = ("-m", "outbox.cli.consume", "tests.perf.parts.consuming:inbox", "--workers", "4")
    with Program("consumer", command, where, ready="consuming") as program:
        program.wait_until_ready()
        yield program
        stop(program)
