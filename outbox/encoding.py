"""Turns a payload into the JSON bytes that are stored: once, in the application, by the standard library."""

from __future__ import annotations

import json
from dataclasses import fields, is_dataclass
from datetime import date, datetime, time
from decimal import Decimal
from enum import Enum
from typing import Any
from uuid import UUID

from outbox.errors import InvalidEvent

JSON = "application/json"
"""The content type of what `encode` returns."""


def is_json(content_type: str) -> bool:
    """Tell whether a content type says JSON: `application/json`, or a type that ends in `+json`; parameters are ignored."""
    essence = content_type.partition(";")[0].strip().lower()
    return essence == JSON or essence.endswith("+json")


def encode(value: object) -> bytes:
    """Return `value` as compact JSON in UTF-8.

    Beyond what JSON has: `Decimal` and `UUID` become strings; `datetime` (with a time zone), `date` and `time` ISO 8601
    strings; an `Enum` its value; a dataclass an object of its fields; a pydantic model what its own
    `model_dump(mode="json")` returns, by the model's rules.

    Raises `InvalidEvent` for anything else, and for what another reader could not understand or would understand
    differently: NaN and infinities, naive datetimes, sets, lone surrogates. Pickle is never used.
    """
    try:
        text = json.dumps(value, default=_default, allow_nan=False, ensure_ascii=False, separators=(",", ":"))
        return text.encode()
    except InvalidEvent:
        raise
    except UnicodeEncodeError as error:
        raise _invalid("contains half of a surrogate pair, which is no text; repair the string where it comes from") from error
    except RecursionError as error:
        raise _invalid("is nested too deeply for JSON") from error
    except (TypeError, ValueError) as error:
        raise _invalid(f"is not JSON: {error}") from error


def _default(value: object) -> Any:
    """Return what stands for a value that JSON does not know."""
    if hasattr(type(value), "model_dump_json"):  # pydantic's models, told without importing pydantic
        return value.model_dump(mode="json")  # type: ignore[attr-defined]
    if is_dataclass(value) and not isinstance(value, type):
        return {field.name: getattr(value, field.name) for field in fields(value)}
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, UUID):
        return str(value)
    if isinstance(value, Decimal):
        return _decimal(value)
    if isinstance(value, datetime):
        return _datetime(value)
    if isinstance(value, date | time):
        return value.isoformat()
    raise _invalid(f"contains {_an(value)}, which JSON has no form for; {_advice(value)}")


def _decimal(value: Decimal) -> str:
    if not value.is_finite():
        raise _invalid("contains a Decimal that is not finite; JSON has no form for it, pass None or a string")
    return str(value)


def _datetime(value: datetime) -> str:
    if value.utcoffset() is None:
        raise _invalid("contains a naive datetime, which means another moment on every host; give it a tzinfo, such as UTC")
    return value.isoformat()


def _advice(value: object) -> str:
    if isinstance(value, set | frozenset):
        return "pass a list in an order that you choose"
    if isinstance(value, bytes | bytearray | memoryview):
        return "pass base64 text, or bytes as the whole payload together with a content_type"
    return "pass a dict, a dataclass or a pydantic model, or encode it yourself and pass bytes together with a content_type"


def _an(value: object) -> str:
    name = type(value).__name__
    return f"an {name}" if name[0].lower() in "aeiou" else f"a {name}"


def _invalid(problem: str) -> InvalidEvent:
    return InvalidEvent("payload", problem)
