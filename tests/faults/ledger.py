"""`python -m tests.faults.ledger`: writers write, everything is killed again and again, and the books must balance.

Relays and the consumer are each killed with SIGKILL at random moments while there is work to do. The truth comes from the
business tables and from what a plain client received, never from the library.
"""

import json
import random
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import click
import sqlalchemy as sa

from outbox.migrations import LATEST
from outbox.migrations.sql import apply
from outbox.tables import DEFAULT
from tests.faults import processes, shop
from tests.faults.observer import Observer
from tests.faults.processes import Program
from tests.servers.postgres import Postgres
from tests.servers.rabbitmq import RabbitMQ


@dataclass(frozen=True)
class Ledger:
    """The books. `published_extra` may be more than zero: a crash between publish and settle publishes again."""

    committed: int
    handled: int
    lost: int
    double_effects: int
    published_extra: int
    phantoms: int
    leftover_rows: int

    @property
    def balances(self) -> bool:
        """Every committed order had its effect exactly once, nothing else had one, and nothing is left over."""
        return self.lost == self.double_effects == self.phantoms == self.leftover_rows == 0


@dataclass(frozen=True)
class Plan:
    """What to do, and what chance decides. `heckled`: somebody listens to the telemetry of all, and raises at every event."""

    orders: int
    writers: int
    rollback: float
    kills: int
    seed: int
    timeout_s: float = 600
    heckled: bool = False


def run(plan: Plan, database_url: str, broker_url: str, say: Callable[[str], None]) -> Ledger:
    """Run one ledger on an empty database and an empty virtual host."""
    engine = sa.create_engine(database_url, poolclass=sa.NullPool)
    with engine.begin() as connection:
        apply(connection, range(1, LATEST + 1))
        shop.metadata.create_all(connection)
    observer = Observer(broker_url)
    relay_program, consumer_program = (
        ("tests.faults.heckled_relay", "tests.faults.heckled_consumer") if plan.heckled else ("outbox", "outbox.cli.consume")
    )
    relays = [processes.relay(f"relay-{number}", database_url, broker_url, program=relay_program) for number in (1, 2)]
    consumer = processes.consumer("consumer", database_url, broker_url, program=consumer_program)
    with ExitStack() as stack:
        stack.enter_context(started([consumer], say))
        consumer.wait_until_ready()  # its queue is there: before, what is published would reach the observer alone
        stack.enter_context(started(relays, say))
        writers = stack.enter_context(started(_writers(plan, database_url), say))
        running = [*relays, consumer]
        _kill_at_random(relays, consumer, plan, engine, say)
        for writer in writers:
            if writer.process.wait(plan.timeout_s) != 0:
                raise RuntimeError(f"{writer.name} failed")
        _until_done(engine, plan, running)
        for program in (*relays, consumer):
            if (code := program.wait_until_ready().terminate()) != 0:
                raise RuntimeError(f"{program.name} ended with exit code {code}")
            if plan.heckled and "a subscriber to telemetry has failed" not in program.log:
                raise RuntimeError(f"{program.name} had no listener")
    return count(engine, published_extra=observer.published_extra())


def count(engine: sa.Engine, *, published_extra: int) -> Ledger:
    """Count the books from the business tables."""
    order, effect = shop.order, shop.effect
    done = sa.select(effect.c.number, sa.func.count().label("times")).group_by(effect.c.number).subquery()
    with engine.connect() as connection:

        def scalar(query: sa.Select[Any]) -> int:
            return int(connection.execute(query).scalar_one())

        return Ledger(
            committed=scalar(sa.select(sa.func.count()).select_from(order)),
            handled=scalar(sa.select(sa.func.count()).select_from(done)),
            lost=scalar(sa.select(sa.func.count()).select_from(order).where(order.c.number.not_in(sa.select(done.c.number)))),
            double_effects=scalar(sa.select(sa.func.coalesce(sa.func.sum(done.c.times - 1), 0))),
            published_extra=published_extra,
            phantoms=scalar(sa.select(sa.func.count()).select_from(done).where(done.c.number.not_in(sa.select(order.c.number)))),
            leftover_rows=scalar(sa.select(sa.func.count()).select_from(DEFAULT.message)),
        )


@contextmanager
def started(programs: Sequence[Program], say: Callable[[str], None]) -> Iterator[Sequence[Program]]:
    """Run programs, and show their logs if something goes wrong."""
    with ExitStack() as stack:
        for program in programs:
            stack.enter_context(program)
        try:
            yield programs
        except BaseException:
            for program in programs:
                say(f"--- {program.name}\n{program.log[-4000:]}")
            raise


def _writers(plan: Plan, database_url: str) -> list[Program]:
    share = -(-plan.orders // plan.writers)
    return [
        Program(
            f"writer-{number}",
            ("-m", "tests.faults.writer", database_url, str(number), str(share), str(plan.rollback), str(plan.seed)),
            {},
        )
        for number in range(plan.writers)
    ]


def _kill_at_random(
    relays: Sequence[Program], consumer: Program, plan: Plan, engine: sa.Engine, say: Callable[[str], None]
) -> None:
    """Kill each program so many times, when a random share of *its* work is done, and start it again at once."""
    chance = random.Random(plan.seed)
    expected = plan.orders * (1 - plan.rollback)
    moments = [(chance.uniform(0.02, 0.9) * expected, program) for program in (*relays, consumer) for _ in range(plan.kills)]
    deadline = time.monotonic() + plan.timeout_s
    while moments:
        published, effects = _published(engine), _effects(engine)
        for moment, program in list(moments):
            done = effects if program is consumer else published
            if done >= moment:
                program.kill()
                program.start()
                moments.remove((moment, program))
                say(f"killed {program.name} when {done} of its messages were done")
        _pause(deadline, [*relays, consumer])


def _until_done(engine: sa.Engine, plan: Plan, programs: Sequence[Program]) -> None:
    deadline = time.monotonic() + plan.timeout_s
    left = sa.select(sa.func.count()).select_from(DEFAULT.message).scalar_subquery()
    orders = sa.select(sa.func.count()).select_from(shop.order).scalar_subquery()
    while True:
        with engine.connect() as connection:
            rows, expected = connection.execute(sa.select(left, orders)).one()
        if rows == 0 and _effects(engine) >= expected:
            return
        _pause(deadline, programs)


def _published(engine: sa.Engine) -> int:
    """How many committed orders have no event in the outbox any more: what the relays have done, from outside."""
    left = sa.select(sa.func.count()).select_from(DEFAULT.message).scalar_subquery()
    orders = sa.select(sa.func.count()).select_from(shop.order).scalar_subquery()
    with engine.connect() as connection:
        return int(connection.execute(sa.select(orders - left)).scalar_one())


def _effects(engine: sa.Engine) -> int:
    with engine.connect() as connection:
        return connection.execute(sa.select(sa.func.count(sa.distinct(shop.effect.c.number)))).scalar_one()


def _pause(deadline: float, programs: Sequence[Program]) -> None:
    if time.monotonic() > deadline:
        raise TimeoutError("the work does not go on")
    for program in programs:
        if (code := program.process.poll()) is not None:
            raise RuntimeError(f"{program.name} ended by itself with exit code {code}")
    time.sleep(0.02)


@click.command()
@click.option("--orders", default=20_000, show_default=True, type=click.IntRange(1))
@click.option("--writers", default=8, show_default=True, type=click.IntRange(1))
@click.option("--rollback", default=0.2, show_default=True, type=click.FloatRange(0, 1), help="Share of orders undone.")
@click.option("--kills", default=3, show_default=True, type=click.IntRange(0), help="How often each process is killed.")
@click.option("--seed", type=int, help="What chance decides (default: a new one, printed).")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def main(*, orders: int, writers: int, rollback: float, kills: int, seed: int | None, as_json: bool) -> None:
    """Run the ledger on a PostgreSQL and a RabbitMQ of its own; exit code 1 unless it balances."""
    plan = Plan(orders, writers, rollback, kills, random.randrange(10**6) if seed is None else seed)
    with Postgres() as postgres, RabbitMQ() as rabbitmq:
        ledger = run(plan, postgres.create_database(), rabbitmq.url, lambda text: click.echo(text, err=True))
    result = {**asdict(ledger), "seed": plan.seed}
    click.echo(json.dumps(result) if as_json else "\n".join(f"{name:<16} {value}" for name, value in result.items()))
    sys.exit(0 if ledger.balances else 1)


if __name__ == "__main__":
    main(prog_name="python -m tests.faults.ledger")
