"""A delivery of a message's own: what of it changes while it waits, and what is refused."""

import pytest

from outbox import Event, InvalidEvent
from outbox.delivery import Delivery
from outbox.publishers.wire_message import address, headers, properties
from outbox.routes import Route, Routes
from tests.rows import outgoing

ROUTES = Routes((Route("#", exchange="routed"),))


def waited(seconds, **values):
    """A row with a delivery, read so many seconds after its insert."""
    row = outgoing()
    delivery = Delivery(**{"exchange": "there", "routing_key": "key"} | values)
    return outgoing(headers=delivery.as_header(), created_at=row.created_at, age_s=float(seconds), message_id=row.message_id)


def test_a_message_with_a_delivery_goes_where_it_says_and_carries_nothing_of_ours_but_its_id():
    row = waited(0, headers={"a": [1]}, properties={"priority": 3})
    assert address(row, ROUTES) == ("there", "key")
    assert headers(row) == {"a": [1]}
    assert properties(row) == {"priority": 3, "message_id": str(row.message_id), "content_type": "application/json"}


def test_a_message_without_one_goes_where_its_route_says():
    assert address(outgoing(), ROUTES) == ("routed", "orders.placed")


@pytest.mark.parametrize(
    ("expires_in_s", "seconds", "expiration"),
    [(10, 4, "6000"), (10, 10, "0"), (10, 99, "0"), (0.5, 0, "500"), (10**9, 5, None), (None, 5, None)],
)
def test_the_expiration_is_what_is_left_of_it(expires_in_s, seconds, expiration):
    assert properties(waited(seconds, expires_in_s=expires_in_s)).get("expiration") == expiration


@pytest.mark.parametrize(("seconds", "rest"), [(0, 5), (2.2, 3), (5, 0), (60, 0)])
def test_a_native_delay_is_what_is_left_of_it(seconds, rest):
    _, routing_key = address(waited(seconds, delay_s=5), ROUTES)
    bits, key = routing_key[:55], routing_key[56:]
    assert (int(bits.replace(".", ""), 2), key) == (rest, "key")


@pytest.mark.parametrize(
    ("values", "problem"),
    [
        ({"exchange": "x" * 256}, "exchange is longer"),
        ({"routing_key": "x" * 220, "delay_s": 1}, "routing_key is longer"),
        ({"headers": {"a": {1: 2}}}, "not a str"),
        ({"headers": {"a": float("nan")}}, "no form"),
        ({"properties": {"priority": 2**70}}, "64 bits"),
        ({"headers": {"a": "\ud800"}}, "surrogate"),
        ({"headers": {"a": "x" * 100_000}}, "more than"),
    ],
)
def test_what_no_broker_carries_is_refused_when_it_is_enqueued(values, problem):
    delivery = Delivery(**{"exchange": "", "routing_key": "key"} | values)
    with pytest.raises(InvalidEvent, match=problem):
        Event(topic="a", payload={}, delivery=delivery)
