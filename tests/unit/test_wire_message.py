"""A row as an AMQP message, and what the wire cannot carry, found before the socket sees it."""

from decimal import Decimal
from uuid import UUID

import amqp
import pytest
from amqp.basic_message import Message
from hypothesis import given
from hypothesis import strategies as st

from outbox.publishers.wire_message import CannotSerialize, headers, prepare, properties
from outbox.wire import RESERVED_PREFIX
from tests.rows import outgoing

FRAME_MAX = 131_072


def received(row, frame_max=FRAME_MAX):
    """The message as a client reads it off the wire."""
    message = Message(row.payload)
    message._load_properties(60, prepare(row, routing_key="r", frame_max=frame_max).properties, 0)
    return message


def test_all_properties_arrive():
    row = outgoing(
        message_id=UUID("0198c5a7-6b1e-7c3f-8a53-0f5d5f9d2b11"), type="Placed", content_type="application/json", key="o-1"
    )

    assert received(row).properties == {
        "message_id": "0198c5a7-6b1e-7c3f-8a53-0f5d5f9d2b11",
        "type": "Placed",
        "content_type": "application/json",
        "content_encoding": "utf-8",
        "delivery_mode": 2,
        "timestamp": 1767323045,
        "application_headers": {"outbox-topic": "orders.placed", "outbox-key": "o-1"},
    }


@pytest.mark.parametrize(
    ("content_type", "encoding"),
    [
        ("application/json", "utf-8"),
        ("application/json; charset=utf-8", "utf-8"),
        ("application/vnd.shop+json", "utf-8"),
        ("text/plain", "utf-8"),
        ("application/octet-stream", "binary"),
        ("application/avro", "binary"),
        ("image/png", "binary"),
        ("application/x-protobuf; name=json", "binary"),
    ],
)
def test_the_encoding_is_said_so_that_no_consumer_guesses(content_type, encoding):
    assert received(outgoing(content_type=content_type)).content_encoding == encoding


@pytest.mark.parametrize(
    "value", ["text", "čž", "", True, False, None, 0, -1, 2**63 - 1, -(2**63), 1.5, [1, "a"], {"a": {"b": None}}]
)
def test_header_values_arrive_as_they_are(value):
    arrived = received(outgoing(headers={"h": value})).headers["h"]

    assert arrived == value
    assert type(arrived) is type(value)


def test_the_topic_and_the_key_are_headers_and_without_a_key_there_is_none():
    assert headers(outgoing(topic="a.b", key="k")) == {"outbox-topic": "a.b", "outbox-key": "k"}
    assert headers(outgoing(topic="a.b")) == {"outbox-topic": "a.b"}


@pytest.mark.parametrize("name", ["topic", "key"])
def test_no_header_of_an_event_replaces_a_reserved_one(name):
    row = outgoing(topic="a.b", key="k", headers={RESERVED_PREFIX + name: "forged", "kept": 1})

    assert headers(row) == {"outbox-topic": "a.b", "outbox-key": "k", "kept": 1}


def test_the_row_itself_is_left_as_it_is():
    row = outgoing(headers={"a": 1}, key="k")
    prepare(row, routing_key="r", frame_max=FRAME_MAX)

    assert row.headers == {"a": 1}


@pytest.mark.parametrize(
    "values",
    [
        {"headers": {"h": 2**63}},
        {"headers": {"h": -(2**63) - 1}},
        {"headers": {"h": {1, 2}}},
        {"headers": {"h": UUID(int=1)}},
        {"headers": {"h": Decimal("1E+3")}},
        {"headers": {"h": [object()]}},
        {"headers": {"n" * 256: 1}},
        {"headers": {5: 1}},
        {"headers": ["not", "a", "mapping"]},
        {"type": "t" * 256},
        {"type": "é" * 128},
        {"content_type": "c" * 256},
    ],
)
def test_what_the_wire_cannot_carry_is_found_here(values):
    with pytest.raises(CannotSerialize, match=r"^header or property: "):
        prepare(outgoing(**values), routing_key="r", frame_max=FRAME_MAX)


@pytest.mark.parametrize("frame_max", [8192, FRAME_MAX])
def test_headers_larger_than_a_frame_are_found_here_with_both_sizes(frame_max):
    with pytest.raises(CannotSerialize, match=rf"headers take \d+ bytes, more than the broker's frame of {frame_max} can carry"):
        prepare(outgoing(headers={"h": "x" * frame_max}), routing_key="r", frame_max=frame_max)

    assert len(received(outgoing(headers={"h": "x" * (frame_max - 2048)}), frame_max).headers["h"]) == frame_max - 2048


@pytest.mark.parametrize("routing_key", ["r" * 256, "é" * 128])
def test_a_routing_key_that_the_wire_cannot_carry_is_found_here(routing_key):
    with pytest.raises(CannotSerialize, match="routing key is longer than 255 bytes"):
        prepare(outgoing(), routing_key=routing_key, frame_max=FRAME_MAX)

    assert prepare(outgoing(), routing_key="é" * 127, frame_max=FRAME_MAX)


@given(
    st.dictionaries(st.text(max_size=300), st.text()), st.text(min_size=1, max_size=300), st.sampled_from(["a/b", "text/x", "é"])
)
def test_what_is_written_here_is_what_py_amqp_writes(values, kind, content_type):
    row = outgoing(headers=values, type=kind, content_type=content_type)
    try:
        wire = prepare(row, routing_key="r", frame_max=FRAME_MAX).properties
    except CannotSerialize:
        return
    assert wire == amqp.Message(application_headers=headers(row), **properties(row))._serialize_properties()


simple = st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats(allow_nan=False) | st.text()
nested = st.recursive(simple, lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner), max_leaves=8)


@given(st.dictionaries(st.text(max_size=300), nested), st.text(min_size=1, max_size=300), st.binary(max_size=50))
def test_any_row_is_either_carried_exactly_or_refused_here(values, kind, payload):
    row = outgoing(headers=values, type=kind, payload=payload)
    try:
        arrived = received(row)
    except CannotSerialize:
        return
    assert arrived.headers == headers(row)
    assert arrived.properties["type"] == properties(row)["type"]
    assert arrived.body == payload
