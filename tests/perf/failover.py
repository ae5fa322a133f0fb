"""How long the partitions of a relay stand still that was killed with SIGKILL while it held them.

Two relays with default settings drain a backlog. One is suspended at a random moment; if it holds leases then, it is killed, else it
goes on. A message more goes into each partition that it held, and the time is from the kill until the last of those has
arrived at a plain client. What the killed one had published and not written down arrives twice, and nothing else does.

`OUTBOX_PERF_LEASE_S` (default: 30, the relay's own), `OUTBOX_PERF_MESSAGES` (default: 20,000) in the backlog, and
`OUTBOX_PERF_WARM_S` (default: 12) for which both relays are at work before; there are as many trials as pairs.
"""

import random
import signal
import statistics
import time
from typing import Any

import amqp
import sqlalchemy as sa

from outbox.identity import PARTITIONS
from outbox.tables import DEFAULT
from tests.faults.processes import Program
from tests.perf.parts.broker import Arrivals, bench_queue
from tests.perf.parts.database import KEYS, count, insert_fresh, prepared, settings, url_of
from tests.perf.parts.relaying import new_relay, require_alive, stop
from tests.perf.parts.sizes import size
from tests.servers.postgres import Postgres
from tests.servers.rabbitmq import RabbitMQ

LEASE_S, MESSAGES, WARM_S = size("LEASE_S", 30), size("MESSAGES", 20_000), size("WARM_S", 12)
BATCH = 1000


def run(*, pairs: int) -> dict[str, Any]:
    """Kill a relay, as often as there are pairs, each time with a new database."""
    options = ("--lease", f"{LEASE_S}s", "--confirm-timeout", f"{min(20, LEASE_S - 5)}s")
    seconds, doubled = list[float](), list[int]()
    with Postgres() as postgres, RabbitMQ() as broker, bench_queue(broker.port) as channel:
        for _ in range(pairs):
            engine = prepared(postgres)
            about = settings(engine)
            taken = _trial(engine, broker.url, channel, options)
            seconds.append(taken[0])
            doubled.append(taken[1])
            url = url_of(engine)
            engine.dispose()
            postgres.drop_database(url)
    return {
        **about,
        "lease_s": LEASE_S,
        "failover_p50_s": round(statistics.median(seconds), 2),
        "failover_max_s": round(max(seconds), 2),
        "failover_beyond_lease_s": round(max(seconds) - LEASE_S, 2),
        "published_twice_max": max(doubled),
    }


def _trial(engine: sa.Engine, broker_url: str, channel: amqp.Channel, options: tuple[str, ...]) -> tuple[float, int]:
    """Return how many seconds the partitions stood still, and how many messages were published twice."""
    url = url_of(engine)
    with new_relay("killed", url, broker_url, *options) as killed, new_relay("survivor", url, broker_url, *options) as survivor:
        for program in (killed, survivor):
            program.wait_until_ready()
        time.sleep(WARM_S)  # a relay that has just come judges no other
        arrivals = Arrivals(channel)
        written = MESSAGES
        insert_fresh(engine, range(written))
        while not (held := _suspend(engine, killed)):
            if _all_arrived(arrivals, written):
                insert_fresh(engine, range(written, written + MESSAGES))
                written += MESSAGES
        killed.kill()
        killed_ns = time.monotonic_ns()
        probes = {_number_in(place, above=written) for place in held}
        for number in probes:
            insert_fresh(engine, range(number, number + 1))
        expected = set(range(written)) | probes
        arrivals.until(lambda: expected <= arrivals.first_ns.keys(), alive=lambda: require_alive(survivor))
        stop(survivor)
        arrivals.close()
    return (max(arrivals.first_ns[number] for number in probes) - killed_ns) / 1e9, _doubled(engine, arrivals, expected, held)


def _all_arrived(arrivals: Arrivals, written: int) -> bool:
    """Take what has come, and tell whether that is all."""
    until = time.monotonic() + 0.05
    arrivals.until(lambda: len(arrivals.first_ns) >= written or time.monotonic() > until)
    return len(arrivals.first_ns) >= written


def _suspend(engine: sa.Engine, program: Program) -> set[int]:
    """Suspend a relay at a random moment; return the partitions that it holds, and let it go on if there are none."""
    time.sleep(random.uniform(0.005, 0.05))
    program.process.send_signal(signal.SIGSTOP)
    partition = DEFAULT.partition
    mine = sa.select(partition.c.partition).where(partition.c.lease_owner.contains(f":{program.process.pid}:"))
    with engine.connect() as connection:
        held = set(connection.execute(mine).scalars())
    if not held:
        program.process.send_signal(signal.SIGCONT)
    return held


def _number_in(partition: int, *, above: int) -> int:
    """Return the number of a message whose key is in that partition, see `insert_fresh`."""
    return (above // KEYS + 1) * KEYS + partition


def _doubled(engine: sa.Engine, arrivals: Arrivals, expected: set[int], held: set[int]) -> int:
    """Return how many messages came twice. Raises for any that could not have: they are of the batch that was lost."""
    doubled = {number for number, times in arrivals.times.items() if times > 1}
    foreign = arrivals.first_ns.keys() - expected
    elsewhere = {number for number in doubled if number % KEYS % PARTITIONS not in held}
    if foreign or elsewhere or len(doubled) > BATCH or count(engine):
        raise RuntimeError(f"{len(foreign)} unknown, {len(doubled)} doubled, {len(elsewhere)} of partitions that were not held")
    return len(doubled)
