"""A `Message` is what was published, byte for byte, through whatever transport."""

from pathlib import Path
from typing import Any

import kombu
import pytest

from outbox.inbox.message import Message, from_kombu

# kombu's SQLAlchemy transport uses what SQLAlchemy 2.1 deprecates, and does what 2.0.0 warned of on SQLite
pytestmark = pytest.mark.filterwarnings(
    "ignore:The ``noload`` loader:sqlalchemy.exc.SADeprecationWarning",
    "ignore:Dialect sqlite:sqlalchemy.exc.SAWarning",
)


def through(url: str, body: Any, **properties: Any) -> Message:
    received: list[kombu.Message] = []
    with kombu.Connection(url) as connection, connection.channel() as channel:
        queue = kombu.Queue("q", kombu.Exchange("e", "topic"), routing_key="orders.*", channel=channel)
        queue.declare()
        kombu.Producer(channel).publish(body, exchange="e", routing_key="orders.placed", **properties)
        with kombu.Consumer(channel, [queue], on_message=received.append):
            connection.drain_events(timeout=5)
        received[0].ack()
    return from_kombu(received[0])


@pytest.fixture(params=["memory://", "sqla+sqlite:///{}/mq.db"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return str(request.param).format(tmp_path)


@pytest.mark.parametrize("encoding", ["utf-8", "binary"])
@pytest.mark.parametrize("body", [b'{"a": "\xc3\xbc"}', bytes(range(256)), b""])
def test_all_fields_survive(url: str, body: bytes, encoding: str) -> None:
    message = through(
        url,
        body,
        content_type="application/json",
        content_encoding=encoding,
        message_id="m-1",
        type="OrderPlaced",
        headers={"outbox-topic": "orders.placed.v2", "outbox-key": "7", "mine": 1},
    )
    assert message == Message(
        message_id="m-1",
        topic="orders.placed.v2",
        payload=body,
        key="7",
        type="OrderPlaced",
        content_type="application/json",
        headers={"outbox-topic": "orders.placed.v2", "outbox-key": "7", "mine": 1},
    )


def test_without_our_headers_the_topic_is_the_routing_key(url: str) -> None:
    message = through(url, b"x", content_type="text/plain", content_encoding="binary")
    assert (message.message_id, message.topic, message.key, message.type) == ("", "orders.placed", None, None)


def test_body_that_a_transport_decoded_is_encoded_again() -> None:
    received = kombu.Message(body="ü", content_encoding="latin-1", properties={"message_id": "m"})
    assert from_kombu(received).payload == b"\xfc"


def test_headers_cannot_be_changed() -> None:
    with pytest.raises(TypeError):
        from_kombu(kombu.Message(body=b"")).headers["a"] = 1  # type: ignore[index]


def test_payload_and_headers_stay_out_of_the_repr() -> None:
    assert "secret" not in repr(Message("m", "t", b"secret", headers={"a": "secret"}))
