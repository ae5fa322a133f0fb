"""One cell of the fault matrix: orders are placed, something fails, and afterwards the books must balance.

Judged from the business tables and from what a plain client received, never from the library.
"""

import json
import random
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any

import amqp
import sqlalchemy as sa
from sqlalchemy.exc import DBAPIError
from sqlalchemy.orm import Session

from outbox.migrations import LATEST
from outbox.migrations.sql import apply
from outbox.tables import DEFAULT
from tests.faults import processes, shop
from tests.faults.ledger import count
from tests.faults.observer import Observer
from tests.faults.processes import Program

CUSTOMERS = 40
BATCH = 96
MOST_IN_BATCH = BATCH + 16  # the share of each of up to 16 partitions is rounded up
WORK_QUEUE = {"x-queue-type": "quorum", "x-delivery-limit": 2_000_000_000, "x-single-active-consumer": True}


class Cell:
    """An empty database and virtual host, with the shop's tables, the consumer's queue and an observer beside it."""

    def __init__(self, database_url: str, broker_url: str) -> None:
        self.database_url = database_url
        self.broker_url = broker_url
        self.engine = sa.create_engine(database_url, poolclass=sa.NullPool)
        self._written = 0
        self._one_writes = threading.Lock()
        with self.engine.begin() as connection:
            apply(connection, range(1, LATEST + 1))
            shop.metadata.create_all(connection)

    def listen(self, **arguments: Any) -> None:
        """Declare the observer's queue and the consumer's, before anything is published: else one would see less than the other."""
        self._observer = Observer(self.broker_url)
        with self.broker() as channel:
            # One consumer at a time gets messages, so that their order can be promised however many there are.
            channel.queue_declare("work", durable=True, auto_delete=False, arguments=WORK_QUEUE | arguments)
            channel.queue_bind("work", "outbox", "orders.*")

    @contextmanager
    def broker(self) -> Iterator[amqp.Channel]:
        """Give a plain channel."""
        with self._observer._channel() as channel:
            yield channel

    def relay(self, name: str, *options: str, broker_url: str | None = None) -> Program:
        """Return a relay, not started, with small batches."""
        url = broker_url or self.broker_url
        return processes.relay(name, self.database_url, url, "--batch-size", str(BATCH), *options)

    def consumer(self, name: str) -> Program:
        """Return a consumer, not started."""
        return processes.consumer(name, self.database_url, self.broker_url, "--workers", "4")

    def write(self, orders: int, *, pause_s: float = 0) -> None:
        """Place so many orders, one after the other, of which every fifth is undone after its event was flushed.

        A database that fails is met with the next order: whether the last one was committed, the table will tell.
        """
        chance = random.Random(self._written)
        engine = sa.create_engine(self.database_url, pool_pre_ping=True, pool_size=1)
        for _ in range(orders):
            try:
                # One at a time, as writers that lock their customer would: or the numbers would be no order to judge by.
                with self._one_writes, Session(engine) as session:
                    self._written += 1
                    shop.place(session, str(self._written), f"customer-{chance.randrange(CUSTOMERS)}")
                    if self._written % 5 == 0:
                        session.flush()
                        session.rollback()
                    else:
                        session.commit()
            except DBAPIError:
                time.sleep(0.05)
            time.sleep(pause_s)
        engine.dispose()

    @contextmanager
    def writing(self, orders: int, *, pause_s: float = 0.005) -> Iterator[None]:
        """Place orders while the block runs, and to the last one before it ends."""
        thread = threading.Thread(target=self.write, args=(orders,), kwargs={"pause_s": pause_s})
        thread.start()
        try:
            yield
        finally:
            thread.join()

    def scalar(self, query: Any) -> int:
        """Return the one number that a query gives."""
        with self.engine.connect() as connection:
            return int(connection.execute(query if isinstance(query, sa.Executable) else sa.text(query)).scalar_one() or 0)

    def left(self, *, up_to: int | None = None) -> int:
        """Return how many events, up to one with that id, are still to be sent."""
        message = DEFAULT.message
        query = sa.select(sa.func.count()).where(message.c.state != "sent")  # kept for a while when the relay is told to
        return self.scalar(query if up_to is None else query.where(message.c.id <= up_to))

    def last_id(self) -> int:
        """Return the highest id in the outbox."""
        return self.scalar(sa.select(sa.func.max(DEFAULT.message.c.id)))

    def effects(self) -> int:
        """Return how many orders have had an effect."""
        return self.scalar(sa.select(sa.func.count(sa.distinct(shop.effect.c.number))))

    def orders(self) -> int:
        """Return how many orders were committed."""
        return self.scalar(sa.select(sa.func.count()).select_from(shop.order))

    def until_done(self, programs: Iterable[Program] = (), *, timeout_s: float = 90) -> None:
        """Wait until nothing is left in the outbox and every order had an effect."""
        until(lambda: self.left() == 0 and self.effects() >= self.orders(), programs, timeout_s=timeout_s)

    def judge(self, *, most_extra: int | None = 0) -> None:
        """Check the books. `most_extra`: how many copies too many may have come to the broker; None: any number."""
        arrived = [int(json.loads(message.body)["number"]) for message in self._observer.received()]
        extra = sum(Counter(arrived).values()) - len(set(arrived))
        with self.engine.connect() as connection:
            customers = {int(row.number): row.customer for row in connection.execute(sa.select(shop.order))}
            handled = [int(n) for n in connection.execute(sa.select(shop.effect.c.number).order_by(shop.effect.c.id)).scalars()]
        ledger = replace(count(self.engine, published_extra=extra), leftover_rows=self.left())
        print(ledger)
        assert ledger.balances, ledger
        assert ledger.committed > 0
        assert set(arrived) == set(customers), "what arrived at the broker is what was committed"
        published, effects = disorder(dict.fromkeys(arrived), customers), disorder(handled, customers)
        assert not published, f"first arrivals out of order, by customer: {published}"
        assert not effects, f"effects out of order, by customer: {effects}"
        assert most_extra is None or extra <= most_extra, f"{extra} copies too many"
        assert self.scalar(sa.select(sa.func.sum(DEFAULT.partition.c.published))) == ledger.committed, "settled once each"


def disorder(numbers: Iterable[int], customers: dict[int, str]) -> dict[str, list[int]]:
    """Return, for each customer whose orders are not in the order of their numbers, those orders."""
    each = defaultdict(list)
    for number in numbers:
        each[customers[number]].append(number)
    return {customer: found for customer, found in each.items() if found != sorted(found)}


def until(condition: Callable[[], bool], programs: Iterable[Program] = (), *, timeout_s: float = 60) -> None:
    """Wait for a condition; fail when it takes too long or when a program ends meanwhile. A server that is away is no news."""
    deadline = time.monotonic() + timeout_s
    while True:
        with suppress(DBAPIError):
            if condition():
                return
        for program in programs:
            assert program.process.poll() is None, f"{program.name} ended by itself:\n{program.log}"
        if time.monotonic() > deadline:
            logs = "\n".join(f"--- {program.name}\n{program.log[-3000:]}" for program in programs)
            raise AssertionError(f"it did not happen in {timeout_s:g} s\n{logs}")
        time.sleep(0.02)
