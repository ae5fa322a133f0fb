"""What a payload may hold, and the bytes it becomes."""

import json
from dataclasses import dataclass
from datetime import UTC, date, datetime, time, timedelta, timezone
from decimal import Decimal
from enum import Enum, IntEnum, StrEnum
from uuid import UUID

import pydantic
import pytest

from outbox.encoding import encode, is_json
from outbox.errors import InvalidEvent


class Colour(Enum):
    RED = "red"


class Size(IntEnum):
    SMALL = 1


class Mood(StrEnum):
    GOOD = "good"


@dataclass
class Line:
    sku: str
    price: Decimal


@dataclass
class Order:
    order_id: UUID
    lines: list[Line]


class Money(pydantic.BaseModel):
    amount: Decimal
    booked: datetime


ID = UUID("0190163d-8694-739b-aea5-966c26f8ad90")


@pytest.mark.parametrize(
    ("value", "encoded"),
    [
        (None, "null"),
        ({"a": [1, 2.5, True, None, "x"]}, '{"a":[1,2.5,true,null,"x"]}'),
        ("žluťoučký 🐎", '"žluťoučký 🐎"'),
        ("NUL \0 is fine in bytes", '"NUL \\u0000 is fine in bytes"'),
        (Decimal("10.50"), '"10.50"'),
        (ID, f'"{ID}"'),
        (date(2026, 1, 2), '"2026-01-02"'),
        (time(9, 30), '"09:30:00"'),
        (datetime(2026, 1, 2, 3, 4, 5, 6, tzinfo=UTC), '"2026-01-02T03:04:05.000006+00:00"'),
        (datetime(2026, 1, 2, tzinfo=timezone(timedelta(hours=2))), '"2026-01-02T00:00:00+02:00"'),
        (Colour.RED, '"red"'),
        (Size.SMALL, "1"),
        (Mood.GOOD, '"good"'),
        ((1, 2), "[1,2]"),
        (Order(ID, [Line("a", Decimal(1))]), f'{{"order_id":"{ID}","lines":[{{"sku":"a","price":"1"}}]}}'),
        ({"order": Order(ID, [])}, f'{{"order":{{"order_id":"{ID}","lines":[]}}}}'),
    ],
)
def test_what_json_lacks_becomes_strings_and_objects(value, encoded):
    assert encode(value) == encoded.encode()


def test_a_pydantic_model_is_encoded_by_its_own_rules():
    model = Money(amount=Decimal("1.10"), booked=datetime(2026, 1, 2, tzinfo=UTC))
    assert json.loads(encode({"money": model})) == {"money": model.model_dump(mode="json")}


def _circle() -> list[object]:
    circle: list[object] = []
    circle.append(circle)
    return circle


def _deep() -> list[object]:
    deep: list[object] = []
    for _ in range(100_000):
        deep = [deep]
    return deep


@pytest.mark.parametrize(
    ("value", "problem"),
    [
        (float("nan"), "not JSON"),
        ({"x": float("inf")}, "not JSON"),
        (Decimal("NaN"), "not finite"),
        (datetime(2026, 1, 2), "naive datetime"),  # noqa: DTZ001 - that is what is refused
        ({1, 2}, "contains a set"),
        (frozenset(), "contains a frozenset"),
        ({"raw": b"x"}, "base64"),
        (timedelta(seconds=1), "contains a timedelta"),
        (object(), "contains an object"),
        (Order, "contains a type"),
        (["\ud800"], "surrogate"),
        ({"\udfff": 1}, "surrogate"),
        ({(1, 2): 3}, "keys must be"),
        (_circle(), "Circular"),
        (_deep(), "nested too deeply"),
    ],
)
def test_what_a_reader_could_not_understand_is_refused(value, problem):
    with pytest.raises(InvalidEvent, match=problem) as caught:
        encode(value)
    assert caught.value.field == "payload"


def test_an_error_does_not_reveal_the_payload():
    with pytest.raises(InvalidEvent) as caught:
        encode({"card": b"4111-1111"})
    assert "4111" not in str(caught.value)


@pytest.mark.parametrize(
    ("content_type", "expected"),
    [
        ("application/json", True),
        ("Application/JSON; charset=utf-8", True),
        ("application/cloudevents+json", True),
        ("text/plain", False),
        ("application/jsonlines", False),
        ("", False),
    ],
)
def test_json_content_types_are_recognised(content_type, expected):
    assert is_json(content_type) is expected
