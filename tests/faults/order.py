"""`python -m tests.faults.order`: many relays, many keys, messages that fail at first, and every key must arrive in order.

Some topics have no queue at first. Their messages fail, and the later ones of their keys, which could go out, must wait for
them. With `--kills` the relays are killed meanwhile. Judged from the order in which a plain client received them.
"""

import json
import random
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import click
import sqlalchemy as sa

import outbox
from outbox.migrations import LATEST
from outbox.migrations.sql import apply
from outbox.tables import DEFAULT
from tests.faults import processes
from tests.faults.ledger import started
from tests.faults.observer import Observer
from tests.faults.processes import Program
from tests.servers.postgres import Postgres
from tests.servers.rabbitmq import RabbitMQ

TOPIC = "orders.placed"
LATE = ("late.x", "late.y")
"""Unroutable until a queue is bound for them: first for the one, and when the other has failed everywhere, for that."""

RETRY = ("--retry-first", "500ms", "--retry-ceiling", "2s", "--max-attempts", "1000")
_AT_ONCE = 5000


@dataclass(frozen=True)
class Plan:
    """What to do, and what chance decides."""

    relays: int
    keys: int
    messages: int
    failing: float
    kills: int
    seed: int
    timeout_s: float = 900


@dataclass(frozen=True)
class Order:
    """What was received. `duplicates` may be more than zero: a crash between publish and settle publishes a batch again."""

    messages: int
    received: int
    distinct: int
    duplicates: int
    order_violations: int
    lost: int
    leftover_rows: int
    seconds: float

    @property
    def holds(self) -> bool:
        """Everything arrived, each key in its order."""
        return self.order_violations == self.lost == self.leftover_rows == 0


@dataclass(frozen=True)
class Numbered:
    """One message: its key, its place among those of its key, and its topic."""

    key: str
    number: int
    topic: str

    def event(self) -> outbox.Event:
        """Return what the application enqueues."""
        return outbox.Event(topic=self.topic, key=self.key, payload={"key": self.key, "number": self.number})


def run(plan: Plan, database_url: str, broker_url: str, say: Callable[[str], None]) -> Order:
    """Run one trial on an empty database and an empty virtual host."""
    began = time.monotonic()
    engine = sa.create_engine(database_url, poolclass=sa.NullPool)
    with engine.begin() as connection:
        apply(connection, range(1, LATEST + 1))
    observer = Observer(broker_url, topics="orders.#")
    messages = list(_messages(plan))
    relays = [processes.relay(f"relay-{number}", database_url, broker_url, *RETRY) for number in range(plan.relays)]
    with started(relays, say):
        trial = Trial(plan, engine, relays, say)
        trial.enqueue(messages)
        trial.bind_late_topics(observer, messages)
        trial.until(lambda: trial.left == 0)
        for relay in relays:
            if (code := relay.wait_until_ready().terminate()) != 0:
                raise RuntimeError(f"{relay.name} ended with exit code {code}")
    return judge(messages, _numbers(observer), leftover_rows=trial.left, seconds=time.monotonic() - began)


def _messages(plan: Plan) -> Iterator[Numbered]:
    chance = random.Random(plan.seed)
    numbers: Counter[str] = Counter()
    for _ in range(plan.messages):
        key = f"key-{chance.randrange(plan.keys)}"
        numbers[key] += 1
        topic = chance.choice(LATE) if chance.random() < plan.failing else TOPIC
        yield Numbered(key, numbers[key], topic)


def _numbers(observer: Observer) -> list[tuple[str, int]]:
    bodies = (json.loads(message.body) for message in observer.all_received())
    return [(body["key"], body["number"]) for body in bodies]


def judge(messages: Iterable[Numbered], received: Sequence[tuple[str, int]], *, leftover_rows: int, seconds: float) -> Order:
    """Compare what was enqueued with what was received, in the order it was received.

    A violation is a message whose first arrival comes after that of a later one of its key. A repetition is none: after a
    crash a whole batch comes again, from its start.
    """
    sent = {(message.key, message.number) for message in messages}
    highest: dict[str, int] = {}
    violations = 0
    for key, number in dict.fromkeys(received):  # first arrivals
        violations += number < highest.get(key, 0)
        highest[key] = max(number, highest.get(key, 0))
    distinct = len(set(received))
    return Order(
        messages=len(sent),
        received=len(received),
        distinct=distinct,
        duplicates=len(received) - distinct,
        order_violations=violations,
        lost=len(sent.difference(received)),
        leftover_rows=leftover_rows,
        seconds=round(seconds, 1),
    )


class Trial:
    """One trial under way: what is done while we wait, and what the tables say."""

    def __init__(self, plan: Plan, engine: sa.Engine, relays: Sequence[Program], say: Callable[[str], None]) -> None:
        chance = random.Random(plan.seed)
        self._engine = engine
        self._relays = relays
        self._say = say
        self._deadline = time.monotonic() + plan.timeout_s
        self._kills = [(chance.uniform(0.02, 0.9) * plan.messages, relay) for relay in relays for _ in range(plan.kills)]

    @property
    def left(self) -> int:
        """How many messages are still in the outbox."""
        return self._scalar(sa.select(sa.func.count()).select_from(DEFAULT.message))

    def enqueue(self, messages: Sequence[Numbered]) -> None:
        """Enqueue, in a few large transactions, while the relays are at work."""
        for start in range(0, len(messages), _AT_ONCE):
            with self._engine.begin() as connection:
                outbox.enqueue_many(connection, [message.event() for message in messages[start : start + _AT_ONCE]])
            self._look_after_relays()

    def bind_late_topics(self, observer: Observer, messages: Sequence[Numbered]) -> None:
        """Bind one late topic after the other, each when every key that has messages of those unbound has failed on one."""
        for place, topic in enumerate(LATE):
            unbound = LATE[place:]
            keys = {message.key for message in messages if message.topic in unbound}
            failed = sa.select(sa.func.count(sa.distinct(DEFAULT.message.c.key))).where(
                DEFAULT.message.c.topic.in_(unbound), DEFAULT.message.c.attempts >= 1
            )
            self._until_it_yields(failed, len(keys))
            observer.bind(topic)
            self._say(f"{topic} bound when messages of {len(keys)} keys had failed and {self.left} were left")

    def _until_it_yields(self, query: sa.Select[Any], number: int) -> None:
        self.until(lambda: self._scalar(query) == number)

    def until(self, condition: Callable[[], bool]) -> None:
        """Wait until something has happened, but not for ever: what is missing then is counted."""
        while not condition() and time.monotonic() < self._deadline:
            self._look_after_relays()
            time.sleep(0.1)

    def _look_after_relays(self) -> None:
        """Kill the relays whose moment has come, and start them again; raise if one has ended by itself."""
        for relay in self._relays:
            if (code := relay.process.poll()) is not None:
                raise RuntimeError(f"{relay.name} ended by itself with exit code {code}")
        published = self._scalar(sa.select(sa.func.sum(DEFAULT.partition.c.published)))
        for moment, relay in list(self._kills):
            if published >= moment:
                relay.kill()
                relay.start()
                self._kills.remove((moment, relay))
                self._say(f"killed {relay.name} when {published} messages were published")

    def _scalar(self, query: sa.Select[Any]) -> int:
        with self._engine.connect() as connection:
            return int(connection.execute(query).scalar_one())


@click.command()
@click.option("--relays", default=4, show_default=True, type=click.IntRange(1))
@click.option("--keys", default=1000, show_default=True, type=click.IntRange(1))
@click.option("--messages", default=100_000, show_default=True, type=click.IntRange(1))
@click.option("--failing", default=0.01, show_default=True, type=click.FloatRange(0, 1), help="Share that fails at first.")
@click.option("--kills", default=0, show_default=True, type=click.IntRange(0), help="How often each relay is killed.")
@click.option("--seed", type=int, help="What chance decides (default: a new one, printed).")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def main(*, relays: int, keys: int, messages: int, failing: float, kills: int, seed: int | None, as_json: bool) -> None:
    """Run one trial on a PostgreSQL and a RabbitMQ of its own; exit code 1 unless all arrived, each key in its order."""
    plan = Plan(relays, keys, messages, failing, kills, random.randrange(10**6) if seed is None else seed)
    with Postgres() as postgres, RabbitMQ() as rabbitmq:
        order = run(plan, postgres.create_database(), rabbitmq.url, lambda text: click.echo(text, err=True))
    result = {**asdict(order), "seed": plan.seed}
    click.echo(json.dumps(result) if as_json else "\n".join(f"{name:<16} {value}" for name, value in result.items()))
    sys.exit(0 if order.holds else 1)


if __name__ == "__main__":
    main(prog_name="python -m tests.faults.order")
