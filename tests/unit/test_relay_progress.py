"""What a relay's loop notes as it gets on, and what it does not: on SQLite, with clocks and publishers of the test's own."""

import threading

import pytest
import sqlalchemy as sa
from sqlalchemy.exc import OperationalError

from outbox.errors import BrokerUnavailable, SchemaError
from outbox.policies import Policies
from outbox.progress import Progress
from outbox.publishers.memory import MemoryPublisher
from outbox.relay import Relay, Transactions, readiness
from outbox.relay.readiness import DatabaseCheck
from outbox.relay.stopping import Stopping
from outbox.tables import DEFAULT
from outbox.vitals import Vitals
from tests.rows import insert
from tests.unit.test_progress import Clock

LEASE_S = 30


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def vitals(clock):
    return Vitals(limit_s=LEASE_S, progress=Progress(seconds=clock))


class Waits(Stopping):
    """Turns the clock instead of waiting, says whether the loop was alive all the while, and stops after so many waits."""

    def __init__(self, vitals, clock, *, waits):
        self.event = threading.Event()
        super().__init__(self.event, grace_s=0)
        self.vitals, self.clock, self.left, self.alive = vitals, clock, waits, []

    def wait(self, timeout_s):
        self.clock.now += timeout_s
        self.alive.append(self.vitals.hung() is None)
        self.left -= 1
        if self.left <= 0:
            self.event.set()


class Watching(MemoryPublisher):
    """Calls `during` at each message that it publishes."""

    def __init__(self, during):
        super().__init__()
        self.during = during

    def publish(self, rows, control):
        self.during()
        return super().publish(rows, control)


def run(engine, vitals, stopping, publisher, *, poll_interval_s=0.5):
    transactions = Transactions(engine, DEFAULT, owner="relay", lease_s=LEASE_S, batch_size=10, policies=Policies())
    Relay(transactions, publisher, stopping, lease_s=LEASE_S, poll_interval_s=poll_interval_s, vitals=vitals).run()


def test_an_idle_relay_is_alive_however_long_its_poll_interval(engine, vitals, clock):
    stopping = Waits(vitals, clock, waits=400)
    run(engine, vitals, stopping, MemoryPublisher(), poll_interval_s=10 * LEASE_S)

    assert all(stopping.alive)
    assert clock.now > 1000 + 10 * LEASE_S


def test_a_publish_that_does_not_return_hangs_after_the_lease_and_is_named(engine, vitals, clock):
    insert(engine, "a")
    seen = []

    def hang():
        clock.now += LEASE_S
        seen.append(vitals.hung())
        clock.now += 0.5
        seen.append(str(vitals.hung()))

    run(engine, vitals, Waits(vitals, clock, waits=1), Watching(hang))

    assert seen == [None, "no progress for 30.5 s while publishing to the broker (limit 30 s)"]
    assert vitals.hung() is None, "afterwards it is well again"


def test_a_call_of_the_database_that_does_not_return_hangs_and_is_named(engine, vitals, clock):
    stopping, seen = Waits(vitals, clock, waits=1), []

    @sa.event.listens_for(engine, "begin")
    def hang(_connection):
        clock.now += LEASE_S + 1
        seen.append(vitals.hung().doing)

    run(engine, vitals, stopping, MemoryPublisher())
    assert seen == ["claiming from the database"]
    assert stopping.alive == [True]


class Away(MemoryPublisher):
    def connect(self):
        raise BrokerUnavailable("broker: Connection refused")


def test_a_broker_that_is_away_is_no_hang_but_a_trouble_and_no_start(engine, vitals, clock):
    stopping = Waits(vitals, clock, waits=50)
    run(engine, vitals, stopping, Away())

    assert all(stopping.alive)
    assert clock.now > 1000 + LEASE_S
    assert vitals.troubles == {"broker": "unreachable"}
    assert (vitals.at_work.is_set(), vitals.started.is_set()) == (True, False)


class Blocked(MemoryPublisher):
    blocked = True


def test_a_broker_that_is_blocked_is_no_hang_but_a_trouble(engine, vitals, clock):
    insert(engine, "a")
    stopping = Waits(vitals, clock, waits=100)
    run(engine, vitals, stopping, Blocked())

    assert all(stopping.alive)
    assert vitals.troubles == {"broker": "blocked"}
    assert vitals.started.is_set()


def test_a_trouble_is_over_with_the_next_turn(engine, vitals, clock):
    run(engine, vitals, Waits(vitals, clock, waits=1), Away())
    run(engine, vitals, Waits(vitals, clock, waits=1), MemoryPublisher())

    assert vitals.troubles == {}
    assert vitals.started.is_set()


@pytest.mark.parametrize("settles", [False, True])
def test_a_database_that_is_away_is_no_hang(engine, vitals, clock, monkeypatch, settles):
    insert(engine, "a")
    failures = []
    really = Transactions.turn_over

    def fail(transactions, last, **options):
        if settles == (last is not None) and len(failures) <= 30:
            failures.append(1)
            raise OperationalError("SELECT", {}, Exception("server closed the connection"))
        return really(transactions, last, **options)

    monkeypatch.setattr(Transactions, "turn_over", fail)
    stopping = Waits(vitals, clock, waits=32)
    run(engine, vitals, stopping, MemoryPublisher())

    assert all(stopping.alive)
    assert clock.now > 1000 + LEASE_S
    assert len(failures) > 30


def test_the_check_compares_all_of_the_schema_first_when_its_version_changes_and_every_minute(engine, monkeypatch):
    verified, clock = [], Clock()
    really = readiness.require
    monkeypatch.setattr(readiness, "require", lambda *arguments: verified.append(1) or really(*arguments))
    check = DatabaseCheck(engine, DEFAULT, seconds=clock)
    for _ in range(5):
        check()
    assert verified == [1]
    clock.now += readiness.VERIFY_EVERY_S + 1
    check()
    assert verified == [1, 1]
    with engine.begin() as connection:
        connection.execute(sa.text("DROP TABLE outbox_message"))
    for _ in range(2):
        with pytest.raises(SchemaError, match="outbox_message"):
            check()
