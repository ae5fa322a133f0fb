"""The frames of a publish, against those that py-amqp writes."""

from types import SimpleNamespace

import amqp
import pytest
from amqp import spec
from amqp.method_framing import frame_writer
from amqp.serialization import dumps
from hypothesis import given
from hypothesis import strategies as st

from outbox.publishers import frames

FRAME_MAX = 4096


def written_by_the_library(exchange, routing_key, message, frame_max):
    written = []
    connection = SimpleNamespace(frame_max=frame_max, bytes_sent=0)
    write = frame_writer(connection, SimpleNamespace(write=lambda part: written.append(bytes(part))))
    write(1, 7, spec.Basic.Publish, dumps("Bssbb", (0, exchange, routing_key, True, False)), message)
    return b"".join(written)


@pytest.mark.parametrize("size", [0, 1, 255, FRAME_MAX - 9, FRAME_MAX - 8, FRAME_MAX - 7, 2 * (FRAME_MAX - 8), 100_000])
def test_a_body_of_any_size_is_cut_as_the_library_cuts_it(size):
    message = amqp.Message(b"x" * size, message_id="m", delivery_mode=2)

    ours = frames.publish(7, "outbox", "orders.placed", message._serialize_properties(), message.body, frame_max=FRAME_MAX)

    assert ours == written_by_the_library("outbox", "orders.placed", message, FRAME_MAX)


@given(st.text(max_size=60), st.text(max_size=60), st.binary(max_size=300))
def test_any_names_are_written_as_the_library_writes_them(exchange, routing_key, body):
    message = amqp.Message(body, type="t")

    ours = frames.publish(7, exchange, routing_key, message._serialize_properties(), body, frame_max=FRAME_MAX)

    assert ours == written_by_the_library(exchange, routing_key, message, FRAME_MAX)


def test_what_a_short_string_cannot_hold_is_an_error():
    with pytest.raises(ValueError, match="256"):
        frames.short("x" * 256)
    assert frames.short("é" * 127) == b"\xfe" + "é".encode() * 127


def test_a_table_with_anything_but_text_is_left_to_the_library():
    assert frames.table({"a": "1"}) == dumps("F", ({"a": "1"},))
    assert frames.table({}) == dumps("F", ({},))
    assert frames.table({"a": "1", "b": 2}) is None
