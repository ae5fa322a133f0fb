"""A batch that is published in two parts comes to the same as one that is published at once."""

import pytest

from outbox.errors import BrokerUnavailable
from outbox.publishers.base import Published, Steady
from outbox.publishers.flight import CONFIRMED, Flight
from outbox.publishers.memory import MemoryPublisher
from outbox.relay import parts
from outbox.states import Outcome, Verdict
from tests.rows import outgoing

ROWS = [outgoing(number, key) for number, key in enumerate(["a", "b", None, "a", "b", None, "c"], start=1)]


def publish(publisher, room, *, control=None, go_on=lambda: True):
    published = parts.publish(publisher, ROWS, control or Steady(), room=room, go_on=go_on)
    return [published.verdicts[row.id].outcome.value for row in ROWS], published.lost


@pytest.mark.parametrize("room", range(len(ROWS) + 1))
@pytest.mark.parametrize("outcome", [Outcome.REJECTED, Outcome.REFUSED, Outcome.UNPUBLISHABLE])
@pytest.mark.parametrize("failing", range(1, len(ROWS) + 1))
def test_wherever_it_is_parted_the_same_comes_of_it(room, outcome, failing):
    def judge(row):
        return Verdict(outcome, "no") if row.id == failing else CONFIRMED

    at_once, in_parts = MemoryPublisher(judge), MemoryPublisher(judge)

    assert publish(in_parts, room) == publish(at_once, len(ROWS))
    for key in "abc":
        assert [row.id for row in in_parts.published if row.key == key] == [row.id for row in at_once.published if row.key == key]


def test_the_second_part_waits_to_be_let_go_on():
    publisher, before = MemoryPublisher(), []
    publish(publisher, 3, go_on=lambda: before.append(len(publisher.published)) or True)

    assert before == [3]


def test_what_may_not_go_on_is_unsent():
    publisher = MemoryPublisher()

    assert publish(publisher, 3, go_on=lambda: False) == (["confirmed"] * 3 + ["unsent"] * 4, None)
    assert len(publisher.published) == 3


def test_after_a_stop_in_the_first_part_nothing_is_asked_and_nothing_sent():
    class Stopped(Steady):
        def may_send(self):
            return len(publisher.published) < 2

    publisher, asked = MemoryPublisher(), []

    assert publish(publisher, 3, control=Stopped(), go_on=lambda: asked.append(1)) == (["confirmed"] * 2 + ["unsent"] * 5, None)
    assert asked == []


def test_after_a_loss_in_the_first_part_the_second_is_unsent():
    class Lost(MemoryPublisher):
        def publish(self, rows, control):
            flight = Flight(rows)
            flight.sent()
            return Published(flight.end(), error)

    error = BrokerUnavailable("gone")

    assert publish(Lost(), 3) == (["unknown"] + ["unsent"] * 6, error)


def test_a_batch_that_fits_asks_nobody():
    asked = []
    publish(MemoryPublisher(), len(ROWS), go_on=lambda: asked.append(1))

    assert asked == []
