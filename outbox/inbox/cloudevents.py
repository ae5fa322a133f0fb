"""Takes a message out of a CloudEvent that has everything in its body, so that handlers see what they see in any other format."""

from __future__ import annotations

import json
import re
from base64 import b64decode
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from outbox.encoding import JSON, is_json
from outbox.wire import CLOUD_EVENTS, CLOUD_EVENTS_JSON

if TYPE_CHECKING:
    from collections.abc import Mapping

_SPACE = re.compile(r"[ \t\n\r]*")
# Numbers stay texts: only where a value ends is of interest, and a long one would take long, or fail, to be made.
_DECODER = json.JSONDecoder(parse_int=str, parse_float=str)


@dataclass(frozen=True, slots=True)
class Opened:
    """A message: its headers, with the attributes of the event under the names of the AMQP binding, its payload and the type of it."""

    headers: Mapping[str, Any]
    content_type: str | None
    payload: bytes


def opened(headers: Mapping[str, Any], content_type: str | None, payload: bytes) -> Opened:
    """Return the message in a structured CloudEvent in JSON; anything else, also one that cannot be read, as it is.

    JSON data is the very text that stands in the event. A header that is there already is left alone.
    """
    if (content_type or "").partition(";")[0].strip().lower() != CLOUD_EVENTS_JSON:
        return Opened(headers, content_type, payload)
    try:
        return _event(headers, _members(payload.decode()))
    except (ValueError, TypeError, LookupError, RecursionError):
        return Opened(headers, content_type, payload)


def attribute(headers: Mapping[str, Any], name: str) -> str | None:
    """Return an attribute of a CloudEvent from a message's headers, whichever binding has put it there."""
    for prefix in CLOUD_EVENTS:
        value = headers.get(prefix + name)
        if value is not None:
            return bytes(value).decode(errors="backslashreplace") if isinstance(value, bytes | bytearray) else str(value)
    return None


def _event(headers: Mapping[str, Any], members: dict[str, str]) -> Opened:
    raw, encoded = members.pop("data", None), members.pop("data_base64", None)
    attributes = {name: value for name, text in members.items() if (value := json.loads(text)) is not None}
    _require(str(attributes["specversion"]).startswith("1."), "not a CloudEvent 1.x")
    _require(all(attributes[name] for name in ("id", "source", "type")), "an attribute that is required is empty")
    content_type = attributes.pop("datacontenttype", None if raw is None else JSON)
    _require(content_type is None or isinstance(content_type, str), "the content type is no text")
    named = {CLOUD_EVENTS[0] + name: value for name, value in attributes.items()}
    return Opened({**named, **headers}, content_type, _payload(content_type, raw, encoded))


def _payload(content_type: str | None, raw: str | None, encoded: str | None) -> bytes:
    if raw is None:
        return b"" if encoded is None else b64decode(json.loads(encoded) or "", validate=True)
    if raw.startswith('"') and not is_json(content_type or JSON):
        text: str = json.loads(raw)
        return text.encode(errors="surrogatepass")
    return raw.encode()


def _members(text: str) -> dict[str, str]:
    """Return the members of a JSON object, each as the text that stands there. Raises `ValueError` and `IndexError`."""
    found: dict[str, str] = {}
    at = _after(text, 0, "{")
    while text[at] != "}":
        name, at = _DECODER.raw_decode(text, at)
        start = _after(text, at, ":")
        _, at = _DECODER.raw_decode(text, start)
        found[str(name)] = text[start:at]
        at = _space(text, at)
        if text[at] != "}":
            at = _after(text, at, ",")
            _require(text[at] == '"', f"expected a name at {at}")
    _require(_space(text, at + 1) == len(text), "there is more behind the event")
    return found


def _require(holds: bool, problem: str) -> None:  # noqa: FBT001 - reads as a sentence
    if not holds:
        raise ValueError(problem)


def _after(text: str, at: int, mark: str) -> int:
    at = _space(text, at)
    _require(text[at] == mark, f"expected {mark} at {at}")
    return _space(text, at + 1)


def _space(text: str, at: int) -> int:
    found = _SPACE.match(text, at)
    return at if found is None else found.end()
