"""Ten minutes without a server, by a clock of the test's own: a relay and a consumer are alive all the while."""

import pytest
from sqlalchemy.exc import OperationalError
from sqlalchemy.orm import sessionmaker

from outbox import Inbox
from outbox.inbox import runner as runner_module
from outbox.inbox.runner import HANGS_S, Runner
from outbox.progress import Progress
from outbox.publishers.memory import MemoryPublisher
from outbox.relay import Transactions
from outbox.vitals import Vitals
from tests.rows import insert
from tests.unit.test_progress import Clock
from tests.unit.test_relay_progress import LEASE_S, Away, Waits, run

TEN_MINUTES_S = 600


@pytest.fixture
def clock():
    return Clock()


@pytest.mark.parametrize("server", ["broker", "database"])
def test_a_relay_without_a_server_is_alive(engine, clock, monkeypatch, server):
    def fail(*_):
        raise OperationalError("SELECT", {}, Exception("connection refused"))

    if server == "database":
        monkeypatch.setattr(Transactions, "claim", fail)
    insert(engine, "a")
    vitals, began = Vitals(limit_s=LEASE_S, progress=Progress(seconds=clock)), clock.now
    stopping = Waits(vitals, clock, waits=250)
    run(engine, vitals, stopping, Away() if server == "broker" else MemoryPublisher())

    assert clock.now - began > TEN_MINUTES_S
    assert all(stopping.alive)


class Stop:
    """A stop that comes after ten minutes, and turns the clock instead of waiting."""

    def __init__(self, vitals, clock):
        self.vitals, self.clock, self.until, self.alive = vitals, clock, clock.now + TEN_MINUTES_S, []

    def is_set(self):
        return self.clock.now >= self.until

    def wait(self, timeout_s):
        self.clock.now += timeout_s
        self.alive.append(self.vitals.hung() is None)


def test_a_consumer_without_a_broker_is_alive(engine, clock, monkeypatch):
    monkeypatch.setattr(runner_module, "monotonic", clock)
    inbox = Inbox("shipping", sessions=sessionmaker(engine))
    inbox.transactional("#")(lambda _session, _message: None)
    vitals = Vitals(limit_s=HANGS_S, progress=Progress(seconds=clock))
    stop = Stop(vitals, clock)
    Runner(inbox, "amqp://127.0.0.1:1//", grace_s=0, vitals=vitals).run(stop)

    assert len(stop.alive) >= TEN_MINUTES_S
    assert all(stop.alive)
    assert vitals.troubles == {"broker": "unreachable"}
