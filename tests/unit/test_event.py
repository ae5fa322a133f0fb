"""Everything about an event that can be wrong is an error where it is made."""

from dataclasses import FrozenInstanceError, dataclass, replace
from datetime import UTC, datetime, timedelta, timezone
from uuid import UUID

import pydantic
import pytest

import outbox
from outbox import Event, InvalidEvent, checks
from outbox.events import as_event
from outbox.headers import MAX_HEADERS_BYTES

ID = UUID("0190163d-8694-739b-aea5-966c26f8ad90")
NAIVE = datetime(2026, 1, 2)  # noqa: DTZ001 - that is what is refused


def made(**parts) -> Event:
    return Event(**({"topic": "orders.placed", "payload": {}} | parts))


def test_an_event_needs_no_more_than_a_topic_and_a_payload():
    event = Event(topic="orders.placed", payload={"n": 1})
    assert event.body == b'{"n":1}'
    assert (event.key, event.headers, event.type, event.content_type, event.message_id) == (None,) * 5


@pytest.mark.parametrize(
    "parts",
    [
        {"key": "k" * 255},
        {"key": "č" * 127},
        {"headers": {"a": "text", "b": True, "c": -(2**63), "d": None, "X-Request-Id": "1"}},
        {"headers": {}},
        {"type": "order placed v1", "content_type": "application/vnd.orders+json"},
        {"payload": b"\x00\xff", "content_type": "application/octet-stream"},
        {"payload": bytearray(b"x"), "content_type": "text/plain"},
        {"payload": b"{}", "content_type": "application/json"},
        {"payload": "NUL \0 in the payload"},
        {"delay": timedelta(0)},
        {"delay": timedelta(seconds=0.5)},
        {"available_at": datetime(2026, 1, 2, tzinfo=UTC)},
        {"message_id": ID},
    ],
)
def test_what_is_valid_is_taken(parts):
    made(**parts)


@pytest.mark.parametrize(
    ("parts", "field", "advice"),
    [
        ({"topic": ""}, "topic", "dot-separated"),
        ({"topic": "orders.*"}, "topic", "dot-separated"),
        ({"topic": "a" * 256}, "topic", "255"),
        ({"topic": 7}, "topic", "dot-separated"),
        ({"key": ""}, "key", "leave it out"),
        ({"key": "k" * 256}, "key", "255 bytes"),
        ({"key": "č" * 128}, "key", "255 bytes"),
        ({"key": "a\0b"}, "key", "NUL"),
        ({"key": "\ud800"}, "key", "surrogate"),
        ({"key": 7}, "key", "str"),
        ({"headers": [("a", "b")]}, "headers", "dict"),
        ({"headers": {1: "a"}}, "headers", "ASCII"),
        ({"headers": {"": "a"}}, "headers", "1 to 128"),
        ({"headers": {"n" * 129: "a"}}, "headers", "1 to 128"),
        ({"headers": {"č": "a"}}, "headers", "ASCII"),
        ({"headers": {"outbox-topic": "a"}}, "headers", "relay"),
        ({"headers": {"x-delay": 1}}, "headers", "brokers"),
        ({"headers": {"a": 2**63}}, "headers", "64 bits"),
        ({"headers": {"a": 1.5}}, "headers", "float"),
        ({"headers": {"a": ["b"]}}, "headers", "list"),
        ({"headers": {"a": ID}}, "headers", "UUID"),
        ({"headers": {"a": "b\0"}}, "headers", "NUL"),
        ({"headers": {"a": "\udc00"}}, "headers", "surrogate"),
        ({"headers": {"a": "b" * MAX_HEADERS_BYTES}}, "headers", "into the payload"),
        ({"type": ""}, "type", "printable"),
        ({"type": "a\nb"}, "type", "printable"),
        ({"type": "\ud800"}, "type", "printable"),
        ({"type": "č" * 128}, "type", "255"),
        ({"content_type": 1}, "content_type", "printable"),
        ({"content_type": "text/plain"}, "content_type", "pass bytes"),
        ({"payload": b"x"}, "content_type", "octet-stream"),
        ({"payload": {1}}, "payload", "list"),
        ({"delay": 5}, "delay", "timedelta"),
        ({"delay": timedelta(seconds=-1)}, "delay", "zero"),
        ({"delay": timedelta.max}, "delay", "days"),
        ({"delay": timedelta(1), "available_at": datetime.now(UTC)}, "delay", "not both"),
        ({"available_at": NAIVE}, "available_at", "naive"),
        ({"available_at": "2026-01-02"}, "available_at", "datetime"),
        ({"available_at": datetime.max.replace(tzinfo=timezone(timedelta(hours=-1)))}, "available_at", "years"),
        ({"message_id": "7"}, "message_id", "UUID"),
        ({"message_id": 7}, "message_id", "UUID"),
    ],
)
def test_what_is_wrong_is_named_with_what_to_do(parts, field, advice):
    with pytest.raises(InvalidEvent, match=advice) as caught:
        made(**parts)
    assert caught.value.field == field


def test_a_payload_over_the_limit_is_refused(monkeypatch):
    monkeypatch.setattr(checks, "MAX_PAYLOAD_BYTES", 10)
    made(payload=b"x" * 10, content_type="text/plain")
    with pytest.raises(InvalidEvent, match="takes 11 bytes"):
        made(payload=b"x" * 11, content_type="text/plain")


def test_what_is_changed_after_the_event_was_made_has_no_effect():
    payload, headers = {"n": 1}, {"a": "b"}
    event = made(payload=payload, headers=headers)
    payload["n"] = 2
    headers["a"] = "c"
    assert (event.body, event.headers) == (b'{"n":1}', {"a": "b"})


def test_an_event_is_frozen_and_can_be_replaced():
    event = made(message_id=str(ID), key="1")
    assert event.message_id == ID
    assert replace(event, payload=[2]).body == b"[2]"
    with pytest.raises(FrozenInstanceError):
        event.key = "2"  # type: ignore[misc]


def test_the_repr_shows_neither_payload_nor_headers():
    assert "secret" not in repr(made(payload="secret", headers={"a": "secret"}))


@outbox.event(topic="orders.placed", key="order_id", headers=lambda order: {"tenant": order.tenant}, type="placed")
@dataclass(frozen=True, slots=True)
class Placed:
    order_id: object
    tenant: str = "t1"


class PlacedLate(Placed):
    pass


@outbox.event(topic="orders.corrected")
class Corrected(Placed):
    pass


def test_an_instance_of_a_registered_dataclass_becomes_an_event():
    event = as_event(Placed("7"))
    assert (event.topic, event.key, event.headers, event.type) == ("orders.placed", "7", {"tenant": "t1"}, "placed")
    assert event.body == b'{"order_id":"7","tenant":"t1"}'


def test_a_subclass_is_registered_like_its_parent_until_it_says_otherwise():
    assert as_event(PlacedLate("7")).topic == "orders.placed"
    assert as_event(Corrected("7")).topic == "orders.corrected"
    assert as_event(Corrected("7")).key is None
    assert as_event(Placed("7")).topic == "orders.placed"


@pytest.mark.parametrize(("order_id", "key"), [("7", "7"), (7, "7"), (ID, str(ID))])
def test_a_key_may_be_text_a_number_or_a_uuid(order_id, key):
    assert as_event(Placed(order_id)).key == key


@pytest.mark.parametrize("order_id", [True, 1.5])
def test_a_key_of_another_type_is_refused(order_id):
    with pytest.raises(InvalidEvent, match="must be a str"):
        as_event(Placed(order_id))


def test_a_key_that_the_database_has_yet_to_make_is_refused():
    with pytest.raises(InvalidEvent, match="flush first") as caught:
        as_event(Placed(None))
    assert caught.value.field == "key"


@pytest.mark.parametrize(("key", "expected"), [(lambda it: it.n, "5"), (lambda _: None, None), (None, None)])
def test_a_key_may_be_computed_or_left_out(key, expected):
    @outbox.event(topic="a", key=key)
    @dataclass
    class Thing:
        n: int = 5

    assert as_event(Thing()).key == expected


def test_a_pydantic_model_can_be_registered():
    @outbox.event(topic="a.b", key="n")
    class Model(pydantic.BaseModel):
        n: int

    class Child(Model):
        m: int = 2

    assert as_event(Model(n=1)).body == b'{"n":1}'
    assert (as_event(Child(n=1)).body, as_event(Child(n=1)).key) == (b'{"n":1,"m":2}', "1")


def test_any_class_can_be_registered_with_an_encoder():
    @outbox.event(topic="a.b", content_type="text/plain", encoder=lambda point: f"{point.x}".encode())
    class Point:
        x = 3

    event = as_event(Point())
    assert (event.body, event.content_type) == (b"3", "text/plain")


def test_a_class_without_a_form_in_json_is_refused_when_enqueued():
    @outbox.event(topic="a.b")
    class Point:
        x = 3

    with pytest.raises(InvalidEvent, match="contains a Point"):
        as_event(Point())


@pytest.mark.parametrize("parts", [{"topic": "no spaces"}, {"topic": "a", "type": ""}, {"topic": "a", "content_type": "\n"}])
def test_a_wrong_registration_fails_at_import(parts):
    with pytest.raises(InvalidEvent):
        outbox.event(**parts)


@pytest.mark.parametrize("value", [{"topic": "a"}, None, object(), Placed])
def test_what_is_no_event_is_refused_with_the_way_to_register_it(value):
    with pytest.raises(InvalidEvent, match="register the class"):
        as_event(value)
