"""Messages as CloudEvents through a real RabbitMQ; what a plain client received is read by the CloudEvents SDK, which is the judge."""

from dataclasses import replace
from datetime import UTC
from typing import Any
from uuid import UUID

import kombu
import pytest
import sqlalchemy as sa
from cloudevents.core.bindings.amqp import AMQPMessage, from_amqp_event
from cloudevents.core.bindings.kafka import KafkaMessage, from_kafka_event
from cloudevents.core.bindings.rabbitmq import RabbitMQMessage, to_binary_event, to_structured_event
from cloudevents.core.v1.event import CloudEvent
from sqlalchemy.orm import Session

import outbox
from outbox import Event, Message
from outbox.outgoing import Outgoing
from outbox.publishers.cloudevents import AMQP, KAFKA, MOST_EXTENSIONS, binary
from outbox.publishers.rabbitmq import RabbitMQPublisher
from outbox.routes import Route, Routes
from outbox.states import Outcome
from outbox.wire import Format
from tests.integration.consuming import Shop, record, relaying, running, until
from tests.integration.test_rabbitmq_publisher import Steer, arrived, declare
from tests.rows import outgoing

BOTH = [Format.CLOUDEVENTS, Format.STRUCTURED]
LONG = "x" * 300
TRACEPARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-00"


def through_rabbitmq(url: str, form: Format | str, *rows: Outgoing) -> list[Any]:
    """Publish, and return what a plain client takes out of the queue."""
    declare(url, "orders", exchange="outbox")
    routes = Routes((), format=Format(form), source="/shop" if form != Format.OUTBOX else "")
    publisher = RabbitMQPublisher(url, routes)
    publisher.connect()
    verdicts = publisher.publish(rows, Steer()).verdicts
    publisher.close()
    assert {verdict.outcome for verdict in verdicts.values()} == {Outcome.CONFIRMED}
    return arrived(url, "orders")


def by_sdk(message: Any) -> CloudEvent:
    """The event as the SDK reads it."""
    body = message.body.encode() if isinstance(message.body, str) else bytes(message.body)
    return from_amqp_event(AMQPMessage({"content-type": message.properties["content_type"]}, message.headers, body))


@pytest.mark.parametrize("form", BOTH)
def test_all_attributes_arrive(vhost_url, form):
    row = outgoing(
        42, key="o-1", type="Placed", headers={"traceparent": TRACEPARENT, "tracestate": f"a={LONG}", "tenant": "north"}
    )
    (message,) = through_rabbitmq(vhost_url, form, row)

    event = by_sdk(message)
    attributes = dict(event.get_attributes())
    assert attributes.pop("time") == row.created_at.astimezone(UTC)
    assert attributes == {
        "specversion": "1.0",
        "id": str(row.message_id),
        "source": "/shop",
        "type": "Placed",
        "subject": "o-1",
        "partitionkey": "o-1",
        "sequence": "0000000000000000042",
        "datacontenttype": "application/json",
        "traceparent": TRACEPARENT,
        "tracestate": f"a={LONG}",
        "tenant": "north",
    }
    assert event.get_data() == {"n": 42}


PAYLOADS = {
    "object": ('{"name":"č","n":1.50}'.encode(), "application/json", {"name": "č", "n": 1.5}),
    "list": (b"[1,2]", "application/json; charset=utf-8", [1, 2]),
    "text in JSON": ('"č"'.encode(), "application/vnd.shop+json", "č"),
    "long number": (b'{"n":' + b"9" * 5000 + b"}", "application/json", None),
    "bytes": (bytes(range(256)), "application/octet-stream", bytes(range(256))),
    "empty": (b"", "application/octet-stream", b""),
    "empty JSON": (b"", "application/json", b""),
    "not JSON": (b"{broken", "application/json", b"{broken"),
    "NaN": (b"[NaN]", "application/json", b"[NaN]"),
    "not UTF-8": (b'"\xff"', "application/json", b'"\xff"'),
    "spaces around": (b' {"a":1}\n', "application/json", b' {"a":1}\n'),
    "twice the same name": (b'{"a":1,"a":2}', "application/json", {"a": 2}),
    "an event in it": (b'{"data":{"id":"}"},"id":"1"}', "application/json", {"data": {"id": "}"}, "id": "1"}),
    "null": (b"null", "application/json", None),
}


@pytest.mark.parametrize("name", PAYLOADS)
def test_any_payload_arrives_in_both_modes_and_at_our_inbox_byte_for_byte(vhost_url, name):
    payload, content_type, data = PAYLOADS[name]
    row = outgoing(payload=payload, content_type=content_type, key="k")
    (plain,) = through_rabbitmq(vhost_url, Format.OUTBOX, row)
    (message,) = through_rabbitmq(vhost_url, Format.CLOUDEVENTS, row)
    (wrapped,) = through_rabbitmq(vhost_url, Format.STRUCTURED, row)

    assert bytes(message.body if isinstance(message.body, bytes) else message.body.encode(errors="surrogateescape")) == payload
    if name != "long number":  # the SDK's own limit
        event = by_sdk(wrapped)
        assert event.get_datacontenttype() == content_type
        assert event.get_data() == data
    before, binary_one, structured_one = (kombu_message(each) for each in (plain, message, wrapped))
    assert structured_one.payload == binary_one.payload == before.payload == payload
    for each in (binary_one, structured_one):
        assert replace(each, headers={}) == replace(before, headers={})
        assert before.headers.items() <= each.headers.items()


def kombu_message(received: Any) -> Message:
    """What our consumer makes of what arrived."""
    from outbox.inbox.message import from_kombu

    body = received.body if isinstance(received.body, bytes) else received.body.encode()
    properties = {name: value for name, value in received.properties.items() if name != "application_headers"}
    return from_kombu(
        kombu.Message(
            body=body,
            properties=properties,
            headers=dict(received.headers),
            content_type=received.properties["content_type"],
            content_encoding=received.properties["content_encoding"],
            delivery_info=received.delivery_info,
        )
    )


ODD = {
    "Tenant": "capital",
    "ten-ant": "hyphen",
    "averyveryverylongname": "21 characters",
    "id": "mine",
    "source": "mine",
    "specversion": "9",
    "type": "mine",
    "time": "yesterday",
    "datacontenttype": "mine",
    "data": "mine",
    "nothing": None,
    "line": "a\nb",
    "noncharacter": "\ufffe",
    "dataschema": "no uri",
    "cloudEvents_type": "mine",
    "sequence": "",
}
EXPRESSIBLE = {"yes": True, "no": False, "small": -5, "big": 2**40, "empty": "", "4711": "digits", "unicode": "č 🎉"}


@pytest.mark.parametrize("form", BOTH)
def test_what_is_no_attribute_stays_a_header_and_the_event_is_valid(vhost_url, form):
    (message,) = through_rabbitmq(vhost_url, form, outgoing(headers=ODD | EXPRESSIBLE, type="Placed"))

    event = by_sdk(message)
    attributes = event.get_attributes()
    core = {"specversion", "id", "source", "type", "time", "sequence", "datacontenttype"}
    assert set(attributes) == core | set(EXPRESSIBLE)
    assert {name: attributes[name] for name in EXPRESSIBLE} == EXPRESSIBLE | {"big": str(2**40)}
    assert (attributes["type"], attributes["source"]) == ("Placed", "/shop")
    kept = {name: value for name, value in (ODD | EXPRESSIBLE).items() if name != "cloudEvents_type" or form == Format.STRUCTURED}
    assert kept.items() <= message.headers.items()


@pytest.mark.parametrize("form", BOTH)
def test_an_event_may_say_what_is_optional_itself(vhost_url, form):
    said = {"subject": "cart/7", "dataschema": "https://shop.example/placed.json", "sequence": "0007", "partitionkey": "p"}
    (message,) = through_rabbitmq(vhost_url, form, outgoing(key="o-1", headers=said))
    assert said.items() <= by_sdk(message).get_attributes().items()
    assert kombu_message(message).key == "o-1"


@pytest.mark.parametrize("form", BOTH)
def test_without_a_key_there_is_no_subject(vhost_url, form):
    (message,) = through_rabbitmq(vhost_url, form, outgoing())
    assert not {"subject", "partitionkey"} & set(by_sdk(message).get_attributes())


@pytest.mark.parametrize("form", BOTH)
def test_a_key_with_a_control_character_is_no_subject_and_still_our_key(vhost_url, form):
    (message,) = through_rabbitmq(vhost_url, form, outgoing(key="a\tb"))
    assert by_sdk(message).get_subject() is None
    assert kombu_message(message).key == "a\tb"


@pytest.mark.parametrize("form", BOTH)
def test_the_most_headers_that_an_event_may_have_fit_into_a_frame(vhost_url, form):
    many = {f"{number:x}": "" for number in range(3500)}
    big = {f"h{number}": "x" * 300 for number in range(MOST_EXTENSIONS)}
    Event(topic="a", payload=1, headers=many)
    Event(topic="a", payload=1, headers=big)
    first, second = through_rabbitmq(vhost_url, form, outgoing(1, headers=many), outgoing(2, headers=big))
    assert set(by_sdk(first).get_attributes()) == {"specversion", "id", "source", "type", "time", "sequence", "datacontenttype"}
    assert big.items() <= by_sdk(second).get_attributes().items()


def test_kafka_has_names_and_values_of_its_own():
    row = outgoing(key="k", headers={"yes": True, "n": 5})
    headers = binary(row, "/shop", KAFKA)
    message = KafkaMessage({name: value.encode() for name, value in headers.items()}, None, row.payload)

    attributes = from_kafka_event(message).get_attributes()
    assert set(attributes) == {name.removeprefix("cloudEvents_") for name in binary(row, "/shop", AMQP)} | {"datacontenttype"}
    assert (attributes["yes"], attributes["n"], attributes["datacontenttype"]) == ("true", "5", "application/json")


def test_a_route_may_have_a_format_of_its_own(vhost_url):
    declare(vhost_url, "orders", exchange="outbox")
    routes = Routes(
        (Route("a.*", format=Format.STRUCTURED), Route("b.*", format=Format.OUTBOX)), format=Format.CLOUDEVENTS, source="/s"
    )
    publisher = RabbitMQPublisher(vhost_url, routes)
    publisher.connect()
    publisher.publish([outgoing(number, topic=topic) for number, topic in enumerate(("a.x", "b.x", "c.x"))], Steer())
    publisher.close()

    by_topic = {each.headers["outbox-topic"]: each for each in arrived(vhost_url, "orders")}
    assert by_topic["a.x"].properties["content_type"].startswith("application/cloudevents+json")
    assert "cloudEvents_id" not in by_topic["b.x"].headers
    assert by_topic["c.x"].headers["cloudEvents_source"] == "/s"


# Our own consumer


@pytest.fixture
def shop(database_url, vhost_url):
    shop = Shop(database_url, vhost_url)
    yield shop
    shop.close()


def received_by(shop):
    """Give the shop a handler that records each message's effect; return the list of what it gets."""
    received: list[Message] = []

    @shop.inbox.transactional("orders.*")
    def handle(session: Session, message: Message) -> None:
        received.append(message)
        record(session, message)

    return received


def test_no_message_is_handled_twice_when_the_format_is_switched_while_it_is_on_its_way(shop, database_url):
    received = received_by(shop)
    shop.declare()
    with shop.engine.begin() as connection:
        connection.execute(sa.text("INSERT INTO outbox_partition (partition) SELECT generate_series(0, 63)"))
        columns = {"topic": "orders.placed", "payload": {"n": 1}, "key": "o-1", "type": "Placed"}
        message_id = outbox.enqueue(connection, Event(**columns))
    formats = (Routes(), *(Routes(format=form, source="/shop") for form in BOTH))
    with running(shop.inbox, shop.broker_url) as runner:
        for number, routes in enumerate(formats, start=1):
            with relaying(database_url, shop.broker_url, routes):
                until(lambda number=number: sum(runner.counts.values()) == number)
            with shop.engine.begin() as connection:  # as a relay leaves it that dies between publish and settle
                outbox.enqueue(connection, Event(**columns, message_id=message_id))
    assert runner.counts == {"handled": 1, "duplicate": 2}
    assert [(each.message_id, each.payload, each.type, each.key) for each in received] == [
        (str(message_id), b'{"n":1}', "Placed", "o-1")
    ]


EVENT = {"id": "7", "source": "/other", "type": "Paid", "partitionkey": "k", "tenant": "north"}


@pytest.mark.parametrize("make", [to_binary_event, to_structured_event])
def test_an_event_of_a_foreign_producer_is_handled_once_in_either_mode(shop, make):
    received = received_by(shop)
    shop.declare()
    for each in (make, make, to_binary_event, to_structured_event):
        event: RabbitMQMessage = each(CloudEvent(dict(EVENT) | {"datacontenttype": "application/json"}, {"ok": True}))
        shop.publish(None, body=event.body, headers=event.headers, content_type=event.content_type)
    with running(shop.inbox, shop.broker_url) as runner:
        until(lambda: sum(runner.counts.values()) == 4)
    assert runner.counts == {"handled": 1, "duplicate": 3}
    (message,) = received
    assert (message.message_id, message.type, message.key, message.json()) == ("/other 7", "Paid", "k", {"ok": True})
    assert message.content_type == "application/json"
    prefix = "ce-" if make is to_binary_event else "cloudEvents_"
    assert (message.headers[f"{prefix}source"], message.headers[f"{prefix}tenant"]) == ("/other", "north")


def test_a_message_id_is_kept_when_the_event_in_the_body_has_another(shop):
    shop.inbox.transactional("orders.*")(record)
    shop.declare()
    event = to_structured_event(CloudEvent(dict(EVENT), {}))
    shop.publish("own", body=event.body, content_type=event.content_type)
    with running(shop.inbox, shop.broker_url) as runner:
        until(lambda: runner.counts["handled"] == 1)
    assert shop.effects() == ["own"]


def test_the_id_is_the_message_id_as_text(vhost_url):
    row = outgoing(message_id=UUID("0198c5a7-6b1e-7c3f-8a53-0f5d5f9d2b11"))
    (message,) = through_rabbitmq(vhost_url, Format.STRUCTURED, row)
    assert by_sdk(message).get_id() == message.properties["message_id"] == "0198c5a7-6b1e-7c3f-8a53-0f5d5f9d2b11"
