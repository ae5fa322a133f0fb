"""The pauses of the loop: short again after every outage, and never in step with those of another relay."""

from datetime import UTC, datetime

import pytest
from sqlalchemy.exc import OperationalError

from outbox.errors import BrokerUnavailable
from outbox.policies import Policies
from outbox.publishers.flight import CONFIRMED
from outbox.publishers.memory import MemoryPublisher
from outbox.relay import Relay, Transactions
from outbox.relay.cleanup import LOOK_EVERY_S, Cleanup
from outbox.tables import DEFAULT
from tests.rows import insert, states
from tests.unit.test_relay_memory import Pauses

AWAY = BrokerUnavailable("no")
OUTAGES, TRIES = 8, 6


def transactions(engine, kind=Transactions):
    return kind(engine, DEFAULT, owner="relay", lease_s=30, batch_size=1000, policies=Policies())


def pauses_of(transactions, publisher, *, last):
    stopping = Pauses(last)
    Relay(transactions, publisher, stopping, lease_s=30, poll_interval_s=0.5).run()
    return stopping.all


class ComesAndGoes(MemoryPublisher):
    """Is away for six tries, then there for one turn, and so on."""

    def __init__(self):
        super().__init__()
        self.turn = 0

    def connect(self):
        self.turn += 1
        if self.turn % (TRIES + 1):
            raise AWAY


@pytest.mark.parametrize("busy", [True, False])
def test_each_outage_of_the_broker_begins_with_the_shortest_pause(engine, busy):
    """Whether there is work in between or not."""

    def enough(taken):
        if busy and not states(engine):
            insert(engine, "a")
        return len(taken) >= OUTAGES * (TRIES + 1)

    publisher = ComesAndGoes()
    pauses = pauses_of(transactions(engine), publisher, last=enough)
    begins = [pauses[outage * (TRIES + 1)] for outage in range(OUTAGES)]

    assert all(0.05 <= pause <= 0.1 for pause in begins)
    assert pauses[TRIES - 1] >= 1.6, "and they do grow"


class FailsNowAndThen(Transactions):
    """The relay's transactions, of which the claim fails six times out of seven."""

    turn = 0

    def claim(self):
        self.turn += 1
        if self.turn % (TRIES + 1):
            raise OperationalError("SELECT", {}, Exception("server closed the connection"))
        return super().claim()


def test_each_outage_of_the_database_begins_with_the_shortest_pause(engine):
    pauses = pauses_of(
        transactions(engine, FailsNowAndThen), MemoryPublisher(), last=lambda taken: len(taken) >= OUTAGES * (TRIES + 1)
    )
    begins = [pauses[outage * (TRIES + 1)] for outage in range(OUTAGES)]

    assert all(0.05 <= pause <= 0.1 for pause in begins)
    assert pauses[TRIES - 1] >= 1.6


def test_two_idle_relays_do_not_poll_in_step(engine):
    first, second = (pauses_of(transactions(engine), MemoryPublisher(), last=lambda taken: len(taken) >= 100) for _ in range(2))
    long = [pause for pause in first if pause > 0.3]

    assert len(set(long)) > 80, "no two pauses are the same"
    assert max(long) - min(long) > 0.05
    assert first != second


def test_a_relay_that_is_never_idle_cleans_up_between_its_batches(engine):
    """Each message that goes out brings the next one, and there is no pause."""
    insert(engine, "old", state="sent", sent_at=datetime(2020, 1, 1, tzinfo=UTC))
    insert(engine, "a")
    stopping, left = Pauses(lambda _taken: False), []

    def publish(_row):
        left.append(states(engine).count("sent"))
        if len(left) < 5:
            insert(engine, "a")
        else:
            stopping.event.set()
        return CONFIRMED

    now = [0.0]
    cleanup = Cleanup(engine, DEFAULT, retention_s=3600, inbox_retention_s=None, clock=lambda: now[0])
    relay = Relay(transactions(engine), MemoryPublisher(publish), stopping, lease_s=30, poll_interval_s=0.5, cleanup=cleanup)
    relay.run()

    assert (left[0], left[-1]) == (1, 0)
    assert stopping.all == []


def test_cleaners_that_were_started_together_do_not_all_look_together(engine):
    now = [0.0]
    cleaners = [Cleanup(engine, DEFAULT, retention_s=1, inbox_retention_s=None, clock=lambda: now[0]) for _ in range(20)]
    for cleaner in cleaners:
        for _ in range(2):
            cleaner.turn()
    due = [min(chore.due_at for chore in cleaner._chores) for cleaner in cleaners]

    assert len(set(due)) == 20
    assert all(LOOK_EVERY_S <= each <= 1.25 * LOOK_EVERY_S for each in due)
