"""By which id a message is known again, whoever published it."""

import kombu
import pytest

from outbox.inbox.ids import message_id_of
from outbox.inbox.message import from_kombu

BINDINGS = ["cloudEvents:", "cloudEvents_", "ce-", "ce_"]


def cloud_event(source: str | bytes, number: str | bytes, prefix: str = "ce-") -> dict[str, str | bytes]:
    return {f"{prefix}source": source, f"{prefix}id": number, f"{prefix}type": "t"}


def test_the_property_comes_first() -> None:
    assert message_id_of({"message_id": "m-1"}, cloud_event("/a", "1")) == "m-1"


@pytest.mark.parametrize("prefix", BINDINGS)
def test_a_cloud_event_is_known_by_its_source_and_id(prefix: str) -> None:
    assert message_id_of({}, cloud_event("/shop", "17", prefix)) == "/shop 17"


def test_the_id_of_a_cloud_event_counts_only_with_its_source() -> None:
    assert message_id_of({}, {"ce-id": "17"}) is None
    assert message_id_of({}, {"ce-id": "17", "ce_source": "/shop"}) is None


def test_two_cloud_events_of_which_only_source_or_id_is_equal_are_two() -> None:
    events = [("/a", "1"), ("/a", "2"), ("/b", "1"), ("/a", "1 2"), ("/a 1", "2"), ("/a", " 1"), ("/a ", "1")]
    assert len({message_id_of({}, cloud_event(*event)) for event in events}) == len(events)


@pytest.mark.parametrize("headers", [cloud_event("/" + "s" * 300, "1"), cloud_event("/s", "1" * 300)])
def test_what_is_too_long_is_represented_by_a_digest(headers: dict[str, str]) -> None:
    message_id = message_id_of({}, headers)
    assert message_id is not None
    assert len(message_id) <= 255
    assert message_id == message_id_of({}, dict(headers))
    assert message_id != message_id_of({}, {**headers, "ce-id": headers["ce-id"] + "x"})


def test_a_property_that_is_too_long_is_represented_by_a_digest() -> None:
    ids = {message_id_of({"message_id": "m" * 256 + end}, {}) for end in "ab"}
    assert len(ids) == 2
    assert all(message_id is not None and len(message_id) <= 255 for message_id in ids)


def test_bytes_are_read_as_text() -> None:
    assert message_id_of({}, cloud_event(b"/shop", b"17")) == "/shop 17"
    assert message_id_of({}, cloud_event(b"/shop", b"\xff")) == "/shop \\xff"


@pytest.mark.parametrize("properties", [{}, {"message_id": None}, {"message_id": ""}])
def test_without_any_there_is_none(properties: dict[str, str | None]) -> None:
    assert message_id_of(properties, {"id": "17", "source": "/shop"}) is None


def test_a_message_from_kombu_has_it() -> None:
    assert from_kombu(kombu.Message(body=b"", headers=cloud_event("/shop", "17"))).message_id == "/shop 17"
    assert from_kombu(kombu.Message(body=b"", properties={"message_id": "m-1"})).message_id == "m-1"
