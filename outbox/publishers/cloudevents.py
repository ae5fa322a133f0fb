"""A row as a CloudEvent 1.0: its attributes beside the payload, in headers (binary mode), or around it, in JSON (structured mode).

Sources: the specification 1.0.2, its bindings for AMQP 1.0 and Kafka, its JSON format, and the extensions partitioning,
sequence and distributed tracing, all in github.com/cloudevents/spec. Written by hand: it is less than what a dependency costs.
"""

from __future__ import annotations

import json
import re
from base64 import b64encode
from dataclasses import dataclass
from datetime import UTC
from typing import TYPE_CHECKING, Any

from outbox.encoding import is_json
from outbox.wire import CLOUD_EVENTS_JSON

if TYPE_CHECKING:
    from collections.abc import Mapping

    from outbox.outgoing import Outgoing

CONTENT_TYPE = f"{CLOUD_EVENTS_JSON}; charset=utf-8"

MOST_EXTENSIONS = 100
"""An event with more headers than this has none of them among its attributes: twice the headers must fit into one frame."""

_NAME = re.compile(r"[a-z0-9]{1,20}")
_OURS = frozenset({"id", "source", "specversion", "type", "time", "datacontenttype", "data"})
_NOT_EMPTY = frozenset({"subject", "dataschema", "partitionkey", "sequence", "traceparent"})
_URI = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*:[A-Za-z0-9._~:/?#\[\]@!$&'()*+,;=%-]*")
# What no attribute may contain: control characters, and the code points that Unicode calls noncharacters.
_NO_TEXT = re.compile(
    f"[\x00-\x1f\x7f-\x9f\ufdd0-\ufdef{''.join(f'{chr(n)}{chr(n + 1)}' for n in range(0xFFFE, 0x110000, 0x10000))}]"
)


@dataclass(frozen=True, slots=True)
class Naming:
    """How a binding writes attributes into headers: what their names begin with, and whether all values are texts."""

    prefix: str
    texts: bool = False


AMQP = Naming("cloudEvents_")
"""The AMQP binding, also on RabbitMQ's AMQP 0-9-1, and on kombu's transports that have no binding of their own."""
KAFKA = Naming("ce_", texts=True)


def binary(row: Outgoing, source: str, naming: Naming) -> dict[str, Any]:
    """Return the headers that make the message a CloudEvent; the payload is its data, and the content type the type of that."""
    found = {f"{naming.prefix}{name}": _text(value) if naming.texts else value for name, value in attributes(row, source).items()}
    return found | {"content-type": row.content_type} if naming.texts else found


def structured(row: Outgoing, source: str) -> bytes:
    """Return the event in JSON. A payload that is JSON stands in it byte for byte, any other in base 64."""
    known = attributes(row, source) | ({"datacontenttype": row.content_type} if row.content_type else {})
    head = json.dumps(known, ensure_ascii=False, separators=(",", ":")).encode()[:-1]
    if is_json(row.content_type) and _is_json_text(row.payload):
        return b'%b,"data":%b}' % (head, row.payload)
    return b'%b,"data_base64":"%b"}' % (head, b64encode(row.payload))


def attributes(row: Outgoing, source: str) -> dict[str, Any]:
    """Return the attributes of the event, without the type of its data. Never raises for what an event may hold.

    The event's own headers are among them wherever CloudEvents allow: a `subject`, `dataschema`, `partitionkey` or `sequence` instead
    of ours, and any other as an extension.
    """
    found: dict[str, Any] = {"sequence": f"{row.id:019d}"}
    if row.key is not None and _is_text(row.key):
        found |= {"subject": row.key, "partitionkey": row.key}
    return (
        found
        | _extensions(row.headers or {})
        | {
            "specversion": "1.0",
            "id": str(row.message_id),
            "source": source,
            "type": row.type if row.type and _is_text(row.type) else row.topic,
            "time": row.created_at.astimezone(UTC).isoformat().replace("+00:00", "Z"),
        }
    )


def _extensions(headers: Mapping[str, Any]) -> dict[str, Any]:
    found = {name: _attribute(value) for name, value in headers.items() if _NAME.fullmatch(name) and name not in _OURS}
    found = {name: value for name, value in found.items() if value is not None and (value != "" or name not in _NOT_EMPTY)}
    for name in _NOT_EMPTY & found.keys():
        found[name] = _text(found[name])
    if not _URI.fullmatch(found.get("dataschema", ":")):
        found.pop("dataschema", None)
    return found if len(found) <= MOST_EXTENSIONS else {}


def _attribute(value: Any) -> Any:
    """Return a header's value as that of an attribute; None for what it cannot be. Whole numbers have 32 bits there."""
    if isinstance(value, bool):
        return value
    if isinstance(value, int):
        return value if -(2**31) <= value < 2**31 else str(value)
    return value if isinstance(value, str) and _is_text(value) else None


def _text(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _is_text(text: str) -> bool:
    return _NO_TEXT.search(text) is None


def _is_json_text(payload: bytes) -> bool:
    """Tell whether a payload is JSON, as RFC 8259 says, in UTF-8, with nothing around it that a reader would lose."""
    if payload[:1].isspace() or payload[-1:].isspace():
        return False
    try:
        _DECODER.decode(payload.decode())
    except (ValueError, RecursionError):
        return False
    return True


def _refuse(name: str) -> None:
    message = f"{name} is not JSON"
    raise ValueError(message)


# Numbers are only looked at: a long one would take long, or fail, to be made.
_DECODER = json.JSONDecoder(parse_constant=_refuse, parse_int=str, parse_float=str)
