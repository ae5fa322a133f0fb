"""The relays' registry: written every ten seconds and at each change of the broker, and never in the relay's way."""

import threading
from datetime import UTC, datetime, timedelta

import pytest
from click.testing import CliRunner
from sqlalchemy import event
from sqlalchemy.exc import OperationalError, ProgrammingError

from outbox import __version__
from outbox.cli import main
from outbox.errors import BrokerUnavailable
from outbox.policies import Policies
from outbox.publishers.memory import MemoryPublisher
from outbox.relay import Relay, Transactions
from outbox.relay.registry import Registry
from outbox.relay.stopping import Stopping
from outbox.states import RetryPolicy
from outbox.store.registry import Broker, relays
from outbox.tables import DEFAULT
from tests.rows import insert


class Clock:
    now = 100.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def registry(engine, clock):
    return Registry(engine, DEFAULT, owner="host:1:ab", clock=clock)


def seen(engine):
    with engine.begin() as connection:
        return relays(connection, DEFAULT)


def unseen_for(engine, owner, **time):
    with engine.begin() as connection:
        relay = DEFAULT.relay
        connection.execute(relay.update().where(relay.c.owner == owner).values(seen_at=datetime.now(UTC) - timedelta(**time)))


def writes(engine):
    counted = []
    event.listen(engine, "before_cursor_execute", lambda *given: counted.append(given[2]) if "outbox_relay" in given[2] else None)
    return counted


def test_a_relay_writes_itself_down_and_takes_itself_out(engine, registry):
    registry.note(Broker.CONNECTED)
    (row,) = seen(engine)
    assert (row.owner, row.version, row.broker, row.silent) == ("host:1:ab", __version__, "connected", False)
    assert row.seen_ago_s < 5

    registry.leave()
    assert seen(engine) == []


def test_it_is_written_every_ten_seconds_and_not_more_often(engine, registry, clock):
    registry.note(Broker.CONNECTED)
    written = writes(engine)
    for _ in range(1000):
        registry.note(Broker.CONNECTED)
    clock.now += 9.9
    registry.note(Broker.CONNECTED)
    assert written == []

    clock.now += 0.2
    unseen_for(engine, "host:1:ab", seconds=30)
    registry.note(Broker.CONNECTED)
    assert seen(engine)[0].seen_ago_s < 5


def test_a_change_of_the_broker_is_written_at_once(engine, registry):
    for broker in (Broker.CONNECTED, Broker.BLOCKED, Broker.UNREACHABLE, Broker.CONNECTED):
        registry.note(broker)
        assert seen(engine)[0].broker == broker


def test_a_relay_that_was_not_seen_for_a_minute_is_silent(engine, clock):
    for owner in ("a", "b", "c"):
        Registry(engine, DEFAULT, owner=owner, clock=clock).note(Broker.CONNECTED)
    unseen_for(engine, "a", seconds=50)
    unseen_for(engine, "b", seconds=70)
    unseen_for(engine, "c", hours=25)
    assert [(each.owner, each.silent) for each in seen(engine)] == [("a", False), ("b", True), ("c", True)]


def test_a_relay_that_was_forgotten_comes_back(engine, registry, clock):
    registry.note(Broker.CONNECTED)
    with engine.begin() as connection:
        connection.execute(DEFAULT.relay.delete())
    clock.now += 11
    registry.note(Broker.CONNECTED)

    assert len(seen(engine)) == 1


@pytest.mark.parametrize(("error", "level"), [(ProgrammingError, "WARNING"), (OperationalError, "DEBUG")])
def test_an_error_of_the_database_is_said_once_and_tried_again_later(engine, registry, clock, caplog, error, level):
    caplog.set_level("DEBUG", "outbox")

    def fail(_connection, _cursor, statement, *_rest):
        if "outbox_relay" in statement:
            raise error(statement, {}, Exception("permission denied"))

    event.listen(engine, "before_cursor_execute", fail)
    registry.note(Broker.CONNECTED)
    clock.now += 11
    registry.note(Broker.CONNECTED)
    registry.leave()
    assert [(record.message, record.levelname) for record in caplog.records] == [("relay not registered", level)]
    assert "permission denied" in caplog.records[0].error

    event.remove(engine, "before_cursor_execute", fail)
    registry.note(Broker.CONNECTED)
    assert seen(engine) == []
    clock.now += 11
    registry.note(Broker.CONNECTED)
    assert len(seen(engine)) == 1


class Moody(MemoryPublisher):
    """A broker that is away, then connected, then blocked, then connected; one mood for each turn."""

    def __init__(self, *moods):
        super().__init__()
        self.moods = list(moods)

    def connect(self):
        mood = self.moods.pop(0) if self.moods else Broker.CONNECTED
        self.blocked = mood is Broker.BLOCKED
        if mood is Broker.UNREACHABLE:
            raise BrokerUnavailable


class Noting(Stopping):
    """Notes what the registry holds at each pause, and stops the relay after so many."""

    def __init__(self, engine, most):
        self.engine, self.event, self.most, self.noted = engine, threading.Event(), most, []
        super().__init__(self.event, grace_s=0)

    def wait(self, timeout_s):
        self.noted += [each.broker for each in seen(self.engine)]
        if len(self.noted) >= self.most:
            self.event.set()


def test_the_relay_notes_how_it_finds_the_broker(engine, registry):
    transactions = Transactions(engine, DEFAULT, owner="r", lease_s=30, batch_size=10, policies=Policies(RetryPolicy()))
    moods = [Broker.UNREACHABLE, Broker.CONNECTED, Broker.BLOCKED, Broker.CONNECTED]
    stopping = Noting(engine, 4)
    Relay(transactions, Moody(*moods), stopping, lease_s=30, poll_interval_s=0.1, registry=registry).run()

    assert stopping.noted == moods


def test_a_broker_that_blocks_in_the_middle_of_a_batch_is_noted_while_the_batch_waits(engine, registry):
    insert(engine, "a", "b")
    found = []

    class Blocks(MemoryPublisher):
        def publish(self, rows, control):
            self.blocked = True
            control.progress()
            found.append(seen(engine)[0].broker)
            self.blocked = False
            return super().publish(rows, control)

    transactions = Transactions(engine, DEFAULT, owner="r", lease_s=30, batch_size=10, policies=Policies(RetryPolicy()))
    stopping = Noting(engine, 1)
    Relay(transactions, Blocks(), stopping, lease_s=30, poll_interval_s=0.1, registry=registry).run()

    assert found == ["blocked"]
    assert stopping.noted == ["connected"]


def test_status_shows_the_relays(engine, clock, tmp_path):
    for owner, broker in (("web-1", Broker.CONNECTED), ("web-2", Broker.BLOCKED)):
        Registry(engine, DEFAULT, owner=owner, clock=clock).note(broker)
    unseen_for(engine, "web-2", seconds=312)
    done = CliRunner().invoke(main, ["status", "--database-url", f"sqlite:///{tmp_path / 'outbox.db'}"])

    assert done.exit_code == 0
    lines = done.output.splitlines()
    at = lines.index("relays         1 at work  1 silent")
    assert lines[at + 1].startswith(f"  web-1  version {__version__}  broker connected  seen ")
    assert lines[at + 2] == f"  web-2  version {__version__}  broker blocked  silent for 312 s"
