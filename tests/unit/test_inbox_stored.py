"""A message that is kept as a row comes back as it was, whatever an AMQP header may hold."""

import math
from datetime import UTC, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

import outbox
from outbox import Message
from outbox.inbox import stored
from outbox.store import failed
from outbox.store.engine import open_engine
from outbox.tables import DEFAULT

HEADERS: dict[str, Any] = {
    "text": "é \N{PILE OF POO}",
    "nul": "a\x00b",
    "half": "\ud800",
    "bytes": b"\x00\xff",
    "int": 2**60,
    "float": 0.1,
    "infinite": math.inf,
    "flag": True,
    "nothing": None,
    "decimal": Decimal("1.50"),
    "when": datetime(2026, 1, 31, 8, 30, tzinfo=UTC),
    "x-death": [{"queue": "shipping", "count": 3, "time": datetime(2026, 1, 31, tzinfo=UTC)}],
}


def test_it_comes_back_as_it_was(tmp_path: Path) -> None:
    engine = open_engine(f"sqlite:///{tmp_path}/app.db")
    outbox.metadata.create_all(engine)
    message = Message("a", "orders.placed", b"\x00\xff", key="7", type="OrderPlaced", content_type="x/y", headers=HEADERS)
    with engine.begin() as connection:
        assert failed.count(connection, DEFAULT, stored.to_row("shipping", message), lease_s=0.0)
        row = connection.execute(sa.select(DEFAULT.failed)).mappings().one()
    found = stored.from_row(row)
    assert dict(found.headers) == HEADERS
    assert (found.message_id, found.topic, found.payload, found.key) == ("a", "orders.placed", b"\x00\xff", "7")
    assert (found.type, found.content_type, found.redelivered) == ("OrderPlaced", "x/y", True)
    engine.dispose()


def test_without_an_id_it_is_filed_under_what_it_consists_of() -> None:
    one, same, other = (stored.to_row("c", Message("", "t", payload)) for payload in (b"1", b"1", b"2"))
    assert one["message_id"] == same["message_id"] != other["message_id"]
    assert stored.from_row(one | {"headers": {}}).message_id == ""


@pytest.mark.parametrize("message_id", ["x" * 256, "nul\x00", "\ud800"])
def test_an_id_that_cannot_be_stored_becomes_a_digest(message_id: str) -> None:
    assert stored.to_row("c", Message(message_id, "t", b""))["message_id"].startswith("unusable id: ")


@pytest.mark.parametrize("key", ["k" * 256, "nul\x00"])
def test_a_key_that_no_index_could_hold_becomes_a_digest(key: str) -> None:
    found = stored.to_row("c", Message("a", "t", b"", key=key))["key"]
    assert found.startswith("digest: ")
    assert found == stored.to_row("c", Message("b", "t", b"", key=key))["key"]
