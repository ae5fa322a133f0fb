"""From the COMMIT to the arrival at a plain consumer, at several rates; and what a relay costs when nothing comes.

With wake-ups the relay polls every two seconds only, as its help advises; without, with its defaults. The times are between the return of a producer's COMMIT and the consumer's callback, on the machine's monotonic clock. Each rate is
kept up for `OUTBOX_PERF_SECONDS` (default: 60) in all, in turns with the others, by one producer up to 100 messages/s and by four
above. Then nothing is written for `OUTBOX_PERF_SILENCE_S` (default: 60), while the server logs every statement: idle queries are all that
the relay sends, BEGIN and COMMIT among them.
"""

import statistics
import time
from typing import Any

import sqlalchemy as sa

from outbox.tables import DEFAULT
from tests.faults.processes import Program
from tests.perf.parts import waking
from tests.perf.parts.broker import Arrivals, bench_queue, check
from tests.perf.parts.database import autocommit, count, prepared, settings, url_of
from tests.perf.parts.relaying import new_relay, require_alive, stop
from tests.perf.parts.sizes import size
from tests.perf.parts.team import Team
from tests.perf.parts.usage import cpu_s
from tests.perf.parts.writing import make_writer
from tests.servers.postgres import Postgres
from tests.servers.rabbitmq import RabbitMQ

RATES = (1, 100, 1000)
SECONDS, SILENCE_S = size("SECONDS", 60), size("SILENCE_S", 60)
MOST_WRITERS = 4
SETTLE_S = 2.0
MARK = "bench-relay|"


def run(*, pairs: int, wake: bool) -> dict[str, Any]:
    """Send at each rate in turn; then listen to the silence."""
    wake_address = waking.new_address() if wake else None
    with Postgres() as postgres, RabbitMQ() as broker, bench_queue(broker.port) as channel:
        engine = prepared(postgres)
        about = settings(engine)
        options = ("--wake", wake_address, "--poll-interval", "2s") if wake_address else ()
        latencies_ms: dict[int, list[float]] = {rate: [] for rate in RATES}
        with (
            new_relay("relay", f"{url_of(engine)}?application_name={MARK}", broker.url, *options) as program,
            Team(MOST_WRITERS, make_writer, url_of(engine), wake_address) as team,
        ):
            program.wait_until_ready()
            arrivals = Arrivals(channel)
            first = _round(team, arrivals, program, 0, per_s=100, seconds=1.0)[0]  # warm up
            for _ in range(pairs):
                for rate in RATES:
                    first, taken = _round(team, arrivals, program, first, per_s=rate, seconds=SECONDS / pairs)
                    latencies_ms[rate] += taken
            idle = _idle(engine, postgres, program)
            stop(program)
        arrivals.close()
        check(arrivals, set(range(first)))
        if left := count(engine, table=DEFAULT.message):
            raise RuntimeError(f"{left} messages are left in the outbox")
        engine.dispose()
    results = {"wake": wake, **about}
    for rate, found in latencies_ms.items():
        results |= {f"p50_ms_at_{rate}": _ms(found, 50), f"p99_ms_at_{rate}": _ms(found, 99), f"messages_at_{rate}": len(found)}
    return results | idle


def _round(
    team: Team, arrivals: Arrivals, program: Program, first: int, *, per_s: int, seconds: float
) -> tuple[int, list[float]]:
    """Send for some seconds; return the next free number, and how many milliseconds each message took."""
    writers = 1 if per_s <= 100 else MOST_WRITERS
    last = first + max(writers, round(per_s * seconds))
    start_ns = time.monotonic_ns() + 50_000_000
    none = range(0)
    team.order(lambda place: (range(first + place, last, writers) if place < writers else none, start_ns, writers / per_s))
    arrivals.until(lambda: len(arrivals.first_ns) >= last, alive=lambda: require_alive(program))
    committed = [each for answer in team.answers() for each in answer]
    return last, [max(0, arrivals.first_ns[number] - at_ns) / 1e6 for number, at_ns in committed]


def _idle(engine: sa.Engine, postgres: Postgres, program: Program) -> dict[str, float]:
    """Return what the relay does in silence."""
    time.sleep(SETTLE_S)  # it is to be idle when the count begins
    autocommit(
        engine, "ALTER SYSTEM SET log_line_prefix = '%a '", "ALTER SYSTEM SET log_statement = 'all'", "SELECT pg_reload_conf()"
    )
    time.sleep(SETTLE_S)
    logged, used_s, began = len(postgres.log), cpu_s(program.process.pid), time.monotonic()
    time.sleep(SILENCE_S)
    seconds = time.monotonic() - began
    lines = [line for line in postgres.log[logged:].splitlines() if line.startswith(MARK)]
    queries = [line for line in lines if "LOG:  statement: " in line or "LOG:  execute " in line]
    return {
        "idle_queries_per_s": round(len(queries) / seconds, 2),
        "idle_transactions_per_s": round(sum("statement: BEGIN" in line for line in queries) / seconds, 2),
        "idle_cpu_percent": round((cpu_s(program.process.pid) - used_s) / seconds * 100, 2),
    }


def _ms(found: list[float], percent: int) -> float:
    """Return a percentile; of few values the largest that they have."""
    each = statistics.quantiles(found, n=100, method="inclusive") if len(found) > 1 else found * 99
    return round(each[percent - 1], 2)
