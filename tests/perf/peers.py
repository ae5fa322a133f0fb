"""The same backlog into the same quorum queue: with this relay, with faststream-outbox, and with the loop that tutorials show.

faststream-outbox runs at its defaults and tuned as its documentation advises (see `parts.faststream_peer`), in an environment of its
own, `.venv-peers`, which is made at the first run from the package index. `OUTBOX_PERF_ROWS` says how many messages a run has
(default: 20,000). The time runs from the commit of the backlog, which wakes those that listen, until all of it has arrived.
"""

import json
import statistics
import subprocess
import sys
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import sqlalchemy as sa

from tests.faults.processes import ROOT, Program
from tests.perf import parts
from tests.perf.parts import backlog, relaying, tutorial
from tests.perf.parts.queue import Queue, queue
from tests.perf.parts.servers import about, servers
from tests.perf.parts.sizes import size
from tests.servers.postgres import Postgres

ROWS = size("ROWS", 20_000)
PEERS = ROOT / ".venv-peers"
REQUIREMENTS = ("faststream-outbox[asyncpg]>=0.19", "faststream[rabbit]>=0.7")

Fill = Callable[[sa.Connection], None]


def run(*, pairs: int) -> dict[str, Any]:
    """Relay in the four ways, alternating; what has arrived is received and counted after each."""
    python = environment()
    rates: dict[str, list[float]] = {}
    with servers() as (postgres, broker), queue(broker.port) as arriving:
        for _ in range(pairs):
            for name, way in _ways(python).items():
                rates.setdefault(name, []).append(way(postgres, broker.url, arriving))
        told = about(postgres, broker)
    per_s = {name: statistics.median(each) for name, each in rates.items()}
    ratios = {f"ratio_to_{name}": round(per_s["ours"] / rate, 2) for name, rate in per_s.items() if name != "ours"}
    return {
        "rows": ROWS,
        "payload_bytes": backlog.PAYLOAD_BYTES,
        **told,
        **_versions(python),
        **{f"{name}_per_s": round(rate, 1) for name, rate in per_s.items()},
        **ratios,
    }


def environment() -> str:
    """Return the peers' own interpreter; makes its environment if there is none."""
    python = PEERS / "bin" / "python"
    if not (PEERS / "ready").exists():
        subprocess.run([sys.executable, "-m", "venv", "--clear", PEERS], check=True)
        subprocess.run([python, "-m", "pip", "--disable-pip-version-check", "--quiet", "install", *REQUIREMENTS], check=True)
        (PEERS / "ready").touch()
    return str(python)


def _versions(python: str) -> dict[str, str]:
    names = ("faststream-outbox", "faststream", "aio-pika", "asyncpg", "sqlalchemy")
    program = f"import importlib.metadata as m, json; print(json.dumps({{n: m.version(n) for n in {names!r}}}))"
    printed = subprocess.run([python, "-c", program], check=True, capture_output=True, text=True).stdout
    return {f"peers_{name}": version for name, version in json.loads(printed).items()}


def _ways(python: str) -> Mapping[str, Callable[[Postgres, str, Queue], float]]:
    return {
        "ours": _ours,
        "faststream_default": lambda *where: _faststream(*where, python=python, mode="default"),
        "faststream_tuned": lambda *where: _faststream(*where, python=python, mode="tuned"),
        "tutorial": _tutorial,
    }


def _ours(postgres: Postgres, broker_url: str, arriving: Queue) -> float:
    with backlog.database(postgres) as url:
        with relaying.relay(url, broker_url) as program:
            with backlog.filling(url, ROWS):
                pass
            seconds = relaying.seconds_until(arriving, ROWS, program)
        _check(url, "SELECT count(*) FROM outbox_message", arriving)
    return ROWS / seconds


def _faststream(postgres: Postgres, broker_url: str, arriving: Queue, *, python: str, mode: str) -> float:
    with _database(postgres) as url:
        asyncpg = url.replace("+psycopg", "+asyncpg")
        command = ["-I", str(Path(parts.__path__[0]) / "faststream_peer.py")]  # nothing of ours is on its import path
        subprocess.run([python, *command, "prepare", asyncpg, broker_url], check=True)
        program = Program(f"faststream_{mode}", [*command, mode, asyncpg, broker_url], {}, ready="ready", python=python)
        seconds = _seconds(program, url, _fill_faststream, arriving)
        _check(url, "SELECT count(*) FROM peer_outbox", arriving)
    return ROWS / seconds


def _tutorial(postgres: Postgres, broker_url: str, arriving: Queue) -> float:
    with _database(postgres) as url:
        with sa.create_engine(url, poolclass=sa.NullPool).begin() as connection:
            connection.exec_driver_sql(tutorial.TABLE)
        plain = url.replace("+psycopg", "")
        program = Program("tutorial", ["-m", "tests.perf.parts.tutorial", plain, broker_url], {}, ready="ready")
        seconds = _seconds(program, url, _fill_tutorial, arriving)
        _check(url, "SELECT count(*) FROM tutorial_outbox WHERE sent_at IS NULL", arriving)
    return ROWS / seconds


def _seconds(program: Program, url: str, fill: Fill, arriving: Queue) -> float:
    with program:
        program.wait_until_ready()
        with sa.create_engine(url, poolclass=sa.NullPool).begin() as connection:
            fill(connection)
        seconds = relaying.seconds_until(arriving, ROWS, program)
        relaying.stop(program)
    return seconds


def _fill_faststream(connection: sa.Connection) -> None:
    with connection.connection.cursor().copy("COPY peer_outbox (queue, payload, headers) FROM STDIN") as copy:
        for number in range(ROWS):
            headers = {"content-type": "application/json", "correlation_id": str(uuid.uuid4())}
            copy.write_row(("bench", backlog.payload(number), json.dumps(headers)))
    connection.exec_driver_sql("SELECT pg_notify('outbox_peer_outbox', 'bench')")


def _fill_tutorial(connection: sa.Connection) -> None:
    with connection.connection.cursor().copy("COPY tutorial_outbox (topic, payload) FROM STDIN") as copy:
        for number in range(ROWS):
            copy.write_row(("bench", backlog.payload(number).decode()))


def _check(url: str, unsent: str, arriving: Queue) -> None:
    """A run that lost or doubled anything, or left anything to be sent again, has no speed."""
    with sa.create_engine(url, poolclass=sa.NullPool).connect() as connection:
        if left := connection.exec_driver_sql(unsent).scalar_one():
            raise RuntimeError(f"{left} messages are not settled")
    arriving.check(ROWS)


@contextmanager
def _database(postgres: Postgres) -> Iterator[str]:
    url = postgres.create_database()
    yield url
    postgres.drop_database(url)
