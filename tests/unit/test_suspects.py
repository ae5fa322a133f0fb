"""Who is suspected when the connection is lost, who is convicted, and that no outage convicts anybody."""

import random

import kombu
import pytest

from outbox.errors import BrokerUnavailable
from outbox.publishers.flight import CONFIRMED, Flight
from outbox.publishers.kombu import KombuPublisher
from outbox.publishers.suspects import GUILTY, MOST_ALONE, Suspects
from outbox.routes import Route, Routes
from outbox.states import Outcome, Verdict
from tests.rows import outgoing

ROWS = [outgoing(number) for number in range(1, 6)]


@pytest.fixture
def suspects():
    return Suspects()


def convict(suspects, row):
    """Lose the connection as often as it takes, with the row alone."""
    for _ in range(MOST_ALONE + 1):
        suspects.lost([row])
        suspects.works()


def test_what_was_on_the_wire_at_a_loss_is_suspected_and_nothing_else(suspects):
    suspects.lost(ROWS[1:3])
    suspects.works()

    assert suspects.alone == {2: 0, 3: 0}


def test_a_suspect_that_was_alone_three_times_is_guilty_once_for_each_loss_from_then_on(suspects):
    row = ROWS[0]
    suspects.lost(ROWS)
    for _ in range(MOST_ALONE):
        suspects.works()
        assert suspects.judge(row) is None
        suspects.lost([row])
    suspects.works()
    assert suspects.judge(row) is GUILTY

    assert suspects.judge(row) is None, "at its next attempt it is tried again"
    suspects.lost([row])
    suspects.works()
    assert suspects.judge(row) is GUILTY


def test_the_first_loss_of_all_only_makes_suspected_even_of_one_alone(suspects):
    suspects.lost([ROWS[0]])
    suspects.works()

    assert suspects.alone == {1: 0}


def test_a_broker_that_is_away_after_the_loss_explains_it(suspects):
    suspects.lost(ROWS)
    suspects.away()
    suspects.works()
    assert suspects.alone == {}


def test_an_outage_while_a_suspect_is_alone_is_not_counted_and_it_stays_a_suspect(suspects):
    suspects.lost(ROWS[:2])
    suspects.works()
    for _ in range(100):
        suspects.lost([ROWS[0]])
        suspects.away()
        suspects.works()

    assert suspects.alone == {1: 0, 2: 0}


@pytest.mark.parametrize("outcome", [Outcome.CONFIRMED, Outcome.REFUSED, Outcome.REJECTED, Outcome.UNPUBLISHABLE])
def test_an_answer_of_the_broker_acquits(suspects, outcome):
    convict(suspects, ROWS[0])
    suspects.answered([ROWS[0]], {1: Verdict(outcome)})

    assert suspects.alone == {}
    assert suspects.judge(ROWS[0]) is None


@pytest.mark.parametrize("verdict", [GUILTY, *map(Verdict, (Outcome.UNKNOWN, Outcome.UNSENT, Outcome.HELD))])
def test_what_is_no_answer_acquits_nobody(suspects, verdict):
    convict(suspects, ROWS[0])
    suspects.answered([ROWS[0]], {1: verdict})

    assert suspects.judge(ROWS[0]) is GUILTY


def test_however_long_it_lives_it_remembers_a_bounded_number(suspects):
    for first in range(0, 30_000, 500):
        suspects.lost([outgoing(number) for number in range(first, first + 500)])
        suspects.works()

    assert len(suspects.alone) == 10_000


# In flight


def test_suspects_are_put_aside_and_called_one_by_one_the_least_tried_first():
    flight = Flight(ROWS, suspects={2: 1, 3: 0, 5: 0})
    sent = []
    while flight.waiting:
        sent.append(flight.sent().id)
    assert sent == [1, 4]

    called = []
    while flight.aside:
        called.append(flight.call_suspect().id)
        assert flight.head.id == called[-1]
        flight.answered(flight.sent(), CONFIRMED)
    assert called == [3, 5, 2]


def test_what_follows_a_suspect_of_its_key_waits_for_it_and_a_suspect_behind_another_row_of_its_key_comes_aside_in_its_turn():
    flight = Flight([outgoing(1, "a"), outgoing(2, "a"), outgoing(3, "b"), outgoing(4, "b")], suspects={1: 0, 4: 0})
    first = flight.sent()
    assert (first.id, flight.waiting) == (3, False)
    flight.answered(first, CONFIRMED)
    assert not flight.waiting

    assert flight.call_suspect().id == 1
    flight.answered(flight.sent(), CONFIRMED)
    assert flight.head.id == 2


def test_a_suspect_that_was_not_called_is_unsent():
    flight = Flight(ROWS[:2], suspects={2: 0})
    flight.sent()

    assert {number: verdict.outcome for number, verdict in flight.end().items()} == {1: Outcome.UNKNOWN, 2: Outcome.UNSENT}


# With kombu's transports


class Steer:
    def may_send(self):
        return True

    def may_wait(self):
        return True

    def progress(self):
        pass


@pytest.fixture
def publisher(monkeypatch):
    """A publisher whose store breaks for some messages, for all, or cannot be reached."""
    publisher = KombuPublisher("memory://", Routes((Route("#", exchange="shop", queues=["orders"]),)))
    publisher.breaks, publisher.arrived, publisher.away = set(), [], False

    def send(row):
        if row.id in publisher.breaks:
            raise ConnectionResetError("Connection reset by peer")
        publisher.arrived.append(row.id)
        return CONFIRMED

    really_connect = kombu.Connection.connect

    def connect(connection):
        if publisher.away:
            raise ConnectionRefusedError("Connection refused")
        return really_connect(connection)

    monkeypatch.setattr(publisher, "_send", send)
    monkeypatch.setattr(kombu.Connection, "connect", connect)
    yield publisher
    publisher.close()
    publisher.away = False
    with kombu.Connection("memory://") as connection:  # all connections of a process share its queues
        connection.channel().queues.clear()
        connection.transport.state.clear()


def publish(publisher, rows):
    """One turn of a relay: connect, publish; return the outcomes."""
    try:
        publisher.connect()
    except BrokerUnavailable:
        return {}
    published = publisher.publish(rows, Steer())
    return {number: verdict.outcome for number, verdict in published.verdicts.items()}


def test_a_message_that_breaks_the_store_ends_rejected_while_its_neighbours_go_first(publisher):
    poison, followers = outgoing(1, "k"), [outgoing(2, "k")]
    publisher.breaks = {1}
    assert publish(publisher, [poison, *followers, outgoing(3)]) == {
        1: Outcome.UNKNOWN, 2: Outcome.UNSENT, 3: Outcome.UNSENT,
    }  # fmt: skip
    for turn in range(MOST_ALONE):
        outcomes = publish(publisher, [poison, *followers, outgoing(10 + turn)])
        assert outcomes == {1: Outcome.UNKNOWN, 2: Outcome.UNSENT, 10 + turn: Outcome.CONFIRMED}
    assert publish(publisher, [poison, *followers, outgoing(20)])[1] is Outcome.REJECTED
    assert publisher.arrived == [10, 11, 12, 20]


def test_a_store_that_takes_nothing_convicts_nobody(publisher):
    rows = [outgoing(number) for number in range(1, 4)]
    publisher.breaks = {1, 2, 3}
    for _ in range(50):
        assert Outcome.REJECTED not in publish(publisher, rows).values()
    publisher.breaks = set()
    assert set(publish(publisher, rows).values()) == {Outcome.CONFIRMED}
    assert publisher.arrived == [1, 2, 3]


@pytest.mark.parametrize("seed", range(5))
def test_a_store_that_comes_and_goes_convicts_nobody(publisher, seed):
    chance, left = random.Random(seed), {number: outgoing(number) for number in range(1, 200)}
    for _turn in range(400):
        publisher.away = chance.random() < 0.3
        publisher.breaks = set(left) if chance.random() < 0.4 else set()
        outcomes = publish(publisher, list(left.values())[:2])
        assert Outcome.REJECTED not in outcomes.values()
        for number, outcome in outcomes.items():
            if outcome is Outcome.CONFIRMED:
                del left[number]
    assert not left
