"""A broker that is away for ten minutes, which pass without sleeping; judged from the tables."""

import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import sqlalchemy as sa

from outbox.errors import BrokerUnavailable
from outbox.outgoing import Outgoing
from outbox.policies import Policies
from outbox.publishers.base import Control, Published
from outbox.publishers.memory import MemoryPublisher
from outbox.relay import Relay, Transactions
from outbox.relay.stopping import Stopping
from outbox.states import Outcome, Verdict
from outbox.tables import DEFAULT
from tests.rows import database, insert, message, partition

AWAY_S = 600.0
REFUSED = BrokerUnavailable("broker: Connection refused")


class Elapsed(Stopping):
    """Waits in no time: adds the seconds up, and stops the relay when `done` says so."""

    def __init__(self, done: Callable[[], bool]) -> None:
        self._stop = threading.Event()
        super().__init__(self._stop, grace_s=0)
        self._done = done
        self.seconds = 0.0

    def wait(self, timeout_s: float) -> None:
        self.seconds += timeout_s
        if self._done():
            self._stop.set()


class Unreachable(MemoryPublisher):
    """A broker that refuses connections while it is away."""

    def __init__(self, away: Callable[[], bool]) -> None:
        super().__init__()
        self.away = away
        self.tries = 0

    def connect(self) -> None:
        if self.away():
            self.tries += 1
            raise REFUSED


class Breaking(Unreachable):
    """A broker that takes every connection while it is away, and loses it with messages on the wire."""

    def connect(self) -> None:
        pass

    def publish(self, rows: Sequence[Outgoing], control: Control) -> Published:
        if not self.away():
            return super().publish(rows, control)
        self.tries += 1
        on_wire = len(rows) // 2
        outcomes = [Outcome.UNKNOWN if place < on_wire else Outcome.UNSENT for place in range(len(rows))]
        return Published({row.id: Verdict(outcome) for row, outcome in zip(rows, outcomes, strict=True)}, REFUSED)


@pytest.fixture
def engine(database_url: str) -> Iterator[sa.Engine]:
    engine = database(database_url)
    yield engine
    engine.dispose()


def rows(engine: sa.Engine) -> list[Any]:
    """What an outage must leave as it is."""
    columns = (message.c.message_id, message.c.attempts, message.c.state, message.c.available_at, message.c.last_error)
    with engine.connect() as connection:
        return list(connection.execute(sa.select(*columns, message.c.failures).order_by(message.c.id)))


def leases(engine: sa.Engine) -> int:
    with engine.connect() as connection:
        return connection.execute(sa.select(sa.func.count(partition.c.lease_owner))).scalar_one()


@pytest.mark.parametrize("broker", [Unreachable, Breaking])
def test_ten_minutes_without_a_broker_spend_no_attempt_and_leave_no_lease(engine: sa.Engine, broker: type[Unreachable]) -> None:
    inserted = insert(engine, *["a", "b", "a", None] * 5)
    inserted += insert(engine, "failed-before", attempts=3, last_error="unroutable")
    before = rows(engine)
    during: list[tuple[list[Any], int]] = []

    def look() -> bool:
        """Look at the tables each time the relay waits."""
        if stopping.seconds < AWAY_S:
            during.append((rows(engine), leases(engine)))
        return rows(engine) == []

    stopping = Elapsed(look)
    publisher = broker(lambda: stopping.seconds < AWAY_S)
    transactions = Transactions(engine, DEFAULT, owner="relay", lease_s=30, batch_size=1000, policies=Policies())
    Relay(transactions, publisher, stopping, lease_s=30, poll_interval_s=0.5).run()

    assert all(found == before for found, _ in during)
    assert not any(held for _, held in during)
    assert AWAY_S / 5 <= publisher.tries <= AWAY_S / 2.5 + 10, "about one in 2.5 to 5 s, after a few quicker ones"
    assert stopping.seconds < AWAY_S + 10, "it goes on soon after the broker is back"
    published = [row.message_id for row in publisher.published]
    assert sorted(published) == sorted(inserted)
    assert [one for one in published if one in inserted[0:20:2]] == inserted[0:20:2], "in the order of their key"
    assert {row.attempts for row in publisher.published} == {0, 3}
