"""A flight hands out rows so that the order of a key survives whatever the broker answers."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outbox.publishers.flight import CONFIRMED, Flight
from outbox.states import Outcome, Verdict
from tests.rows import outgoing

REJECTED = Verdict(Outcome.REJECTED, "unroutable")
REFUSED = Verdict(Outcome.REFUSED, "nack")


def outcomes(flight):
    return {number: verdict.outcome for number, verdict in sorted(flight.end().items())}


def send_all(flight):
    """Put everything on the wire that may go now."""
    sent = []
    while flight.waiting:
        sent.append(flight.sent(len(flight.head.payload)))
    return sent


def test_rows_without_a_key_do_not_wait_for_each_other():
    flight = Flight([outgoing(1), outgoing(2), outgoing(3)])

    assert [row.id for row in send_all(flight)] == [1, 2, 3]
    assert flight.on_wire == 3


def test_the_next_row_of_a_key_may_go_only_when_the_one_before_is_confirmed():
    first, second, other = rows = [outgoing(1, "a"), outgoing(2, "a"), outgoing(3, "b")]
    flight = Flight(rows)

    assert send_all(flight) == [first, other]
    assert not flight.waiting
    flight.answered(first, CONFIRMED)
    assert flight.head is second


@pytest.mark.parametrize("verdict", [REJECTED, REFUSED])
def test_a_failure_holds_the_rest_of_its_key_and_nothing_else(verdict):
    rows = [outgoing(1, "a"), outgoing(2, "a"), outgoing(3, "a"), outgoing(4, "b"), outgoing(5)]
    flight = Flight(rows)
    for row in send_all(flight):
        flight.answered(row, verdict if row.id == 1 else CONFIRMED)

    assert not flight.waiting
    assert outcomes(flight) == {
        1: verdict.outcome,
        2: Outcome.HELD,
        3: Outcome.HELD,
        4: Outcome.CONFIRMED,
        5: Outcome.CONFIRMED,
    }


def test_a_failure_in_the_middle_of_a_key_leaves_what_was_confirmed():
    rows = [outgoing(number, "a") for number in (1, 2, 3)]
    flight = Flight(rows)
    flight.answered(flight.sent(), CONFIRMED)
    flight.answered(flight.sent(), REJECTED)

    assert outcomes(flight) == {1: Outcome.CONFIRMED, 2: Outcome.REJECTED, 3: Outcome.HELD}


def test_a_row_that_cannot_be_sent_at_all_holds_the_rest_of_its_key():
    flight = Flight([outgoing(1, "a"), outgoing(2, "a"), outgoing(3)])
    flight.failed(Verdict(Outcome.UNPUBLISHABLE, "headers"))

    assert [row.id for row in send_all(flight)] == [3]
    assert outcomes(flight) == {1: Outcome.UNPUBLISHABLE, 2: Outcome.HELD, 3: Outcome.UNKNOWN}


def test_what_was_sent_without_an_answer_is_unknown_and_what_waited_is_unsent():
    flight = Flight([outgoing(1, "a"), outgoing(2, "a"), outgoing(3), outgoing(4)])
    flight.sent()
    flight.sent()

    assert outcomes(flight) == {1: Outcome.UNKNOWN, 2: Outcome.UNSENT, 3: Outcome.UNKNOWN, 4: Outcome.UNSENT}


def test_an_answer_for_what_is_not_on_the_wire_changes_nothing():
    row = outgoing(1)
    flight = Flight([row])
    flight.answered(row, CONFIRMED)
    assert flight.verdicts == {}

    flight.answered(flight.sent(), CONFIRMED)
    flight.answered(row, REJECTED)

    assert outcomes(flight) == {1: Outcome.CONFIRMED}
    assert flight.wire_bytes == 0


def test_what_a_lost_channel_had_in_flight_is_sent_again_first_and_in_order():
    flight = Flight([outgoing(number) for number in (1, 2, 3, 4, 5)])
    sent = [flight.sent() for _ in range(4)]
    flight.answered(sent[1], CONFIRMED)

    assert [row.id for row in flight.take_unknown()] == [1, 3, 4]
    assert (flight.on_wire, flight.wire_bytes) == (0, 0)
    assert [row.id for row in send_all(flight)] == [1, 3, 4, 5]


def test_the_bytes_on_the_wire_are_those_without_an_answer():
    flight = Flight([outgoing(1, payload=b"x" * 10), outgoing(2, payload=b"x" * 100)])
    first, _ = send_all(flight)
    assert flight.wire_bytes == 110

    flight.answered(first, CONFIRMED)
    assert flight.wire_bytes == 100


def test_an_empty_batch_has_no_verdicts():
    flight = Flight([])
    assert not flight.waiting
    assert flight.end() == {}


class Broker:
    """Drives a flight as `data` draws it, and checks after each step what must hold throughout."""

    def __init__(self, rows, data):
        self.flight, self.rows, self.data = Flight(rows), rows, data
        self.on_wire: dict[int, object] = {}
        self.given: dict[int, Verdict] = {}  # by our own account
        self.failed_keys: dict[str, int] = {}
        self.confirmed_of_key: dict[str, int] = {}

    def steps(self):
        if self.flight.waiting:
            yield from (self.send, self.fail_locally)
        if self.on_wire:
            yield from (self.confirm, self.reject, self.lose_channel)

    def run(self):
        for _ in range(self.data.draw(st.integers(0, 4 * len(self.rows)), label="steps")):
            steps = list(self.steps())
            if not steps:
                break
            self.data.draw(st.sampled_from(steps))()
            assert self.flight.on_wire == len(self.on_wire)
            assert self.flight.wire_bytes == sum(len(row.payload) for row in self.on_wire.values())

    def send(self):
        head = self.flight.head
        row = self.flight.sent(len(head.payload))
        assert row is head
        assert row.id not in self.given, "sent after it had its verdict"
        self.on_wire[row.id] = row
        if row.key is None:
            return
        keys = [each.key for each in self.on_wire.values() if each.key is not None]
        assert len(keys) == len(set(keys)), "two rows of one key on the wire"
        assert row.key not in self.failed_keys, "sent behind a failure of its key"
        assert row.id > self.confirmed_of_key.get(row.key, 0)
        earlier = [each.id for each in self.rows if each.key == row.key and each.id < row.id]
        assert all(self.given[number] is CONFIRMED for number in earlier), "overtook an earlier row of its key"

    def answer(self, verdict):
        row = self.on_wire.pop(self.data.draw(st.sampled_from(sorted(self.on_wire))))
        self.flight.answered(row, verdict)
        self.note(row, verdict)

    def confirm(self):
        self.answer(CONFIRMED)

    def reject(self):
        self.answer(self.data.draw(st.sampled_from([REJECTED, REFUSED])))

    def fail_locally(self):
        row, verdict = self.flight.head, Verdict(Outcome.UNPUBLISHABLE, "headers")
        self.flight.failed(verdict)
        self.note(row, verdict)

    def lose_channel(self):
        assert [row.id for row in self.flight.take_unknown()] == sorted(self.on_wire)
        self.on_wire.clear()

    def note(self, row, verdict):
        assert row.id not in self.given
        self.given[row.id] = verdict
        if row.key is None:
            return
        if verdict is CONFIRMED:
            self.confirmed_of_key[row.key] = row.id
        else:
            self.failed_keys[row.key] = row.id

    def expected(self, row):
        if row.id in self.given:
            return self.given[row.id].outcome
        if row.key in self.failed_keys:
            return Outcome.HELD
        return Outcome.UNKNOWN if row.id in self.on_wire else Outcome.UNSENT


@settings(max_examples=500, deadline=None)
@given(st.data())
def test_no_outcomes_in_no_order_break_the_order_of_a_key(data):
    keys = data.draw(st.lists(st.sampled_from([None, "a", "b", "c"]), max_size=12), label="keys")
    rows = [outgoing(number, key, partition=0) for number, key in enumerate(keys, start=1)]
    broker = Broker(rows, data)
    broker.run()

    assert outcomes(broker.flight) == {row.id: broker.expected(row) for row in rows}


# An address that is said to lead nowhere

PLACE = ("outbox", "nowhere")


def lead(flight):
    """Send the first row as the one that is tried, and let the others follow it."""
    assert not flight.follow(PLACE)
    leader = flight.sent()
    while flight.waiting:
        assert flight.follow(PLACE)
    return leader


def test_what_follows_shares_the_rejection_of_the_first():
    flight = Flight([outgoing(1), outgoing(2, "a"), outgoing(3, "a"), outgoing(4)])
    flight.answered(lead(flight), REJECTED)

    assert outcomes(flight) == {1: Outcome.REJECTED, 2: Outcome.REJECTED, 3: Outcome.HELD, 4: Outcome.REJECTED}


def test_what_comes_after_the_rejection_is_rejected_too():
    flight = Flight([outgoing(1, "a"), outgoing(2, "b")])
    assert not flight.follow(PLACE)
    flight.answered(flight.sent(), REJECTED)

    assert flight.follow(PLACE)
    assert outcomes(flight) == {1: Outcome.REJECTED, 2: Outcome.REJECTED}


@pytest.mark.parametrize("verdict", [CONFIRMED, REFUSED])
def test_what_follows_is_sent_when_the_first_was_not_rejected(verdict):
    flight = Flight([outgoing(1), outgoing(2), outgoing(3)])
    flight.answered(lead(flight), verdict)

    assert flight.through == {PLACE}
    assert not flight.follow(PLACE)
    assert [row.id for row in send_all(flight)] == [2, 3]


def test_what_follows_one_that_has_no_answer_is_unsent():
    flight = Flight([outgoing(1), outgoing(2)])
    lead(flight)

    assert outcomes(flight) == {1: Outcome.UNKNOWN, 2: Outcome.UNSENT}


def test_one_that_has_to_be_sent_again_does_not_follow_itself():
    flight = Flight([outgoing(1), outgoing(2)])
    leader = lead(flight)
    flight.take_unknown()

    assert flight.head == leader
    assert not flight.follow(PLACE)


def test_what_was_recalled_is_the_next_to_go_again():
    flight = Flight([outgoing(1), outgoing(2), outgoing(3)])
    rows = [flight.sent(10) for _ in range(2)]
    for row in reversed(rows):
        flight.recall(row)

    assert (flight.on_wire, flight.wire_bytes) == (0, 0)
    assert [row.id for row in send_all(flight)] == [1, 2, 3]


def test_headers_that_were_too_large_to_be_read_are_judged_without_being_sent():
    flight = Flight([outgoing(1, "a", headers=None), outgoing(2, "a"), outgoing(3)])

    assert [row.id for row in send_all(flight)] == [3]
    assert outcomes(flight) == {1: Outcome.UNPUBLISHABLE, 2: Outcome.HELD, 3: Outcome.UNKNOWN}
    assert "131072 bytes" in flight.verdicts[1].reason
