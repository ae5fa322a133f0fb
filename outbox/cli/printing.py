"""What rows look like on a terminal and in JSON."""

from __future__ import annotations

import base64
import json
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any
from uuid import UUID

if TYPE_CHECKING:
    from collections.abc import Mapping

_LINES = "\n\t"


def plain(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return a row as JSON can hold it."""
    found = {name: _simple(value) for name, value in row.items()}
    if "failures" in found:
        found["failures"] = [_attempt(each) for each in found["failures"]]
    return found


def printable(text: str, *, keep: str = "") -> str:
    """Escape what would move the cursor, or colour the terminal: keys, errors and payloads come from elsewhere."""
    return "".join(c if c.isprintable() or c in keep else c.encode("unicode_escape").decode() for c in text)


def page(found: Mapping[str, Any]) -> str:
    """Return every column of one plain row, a line each; of its failures one line each."""
    lines = []
    for name, value in found.items():
        texts = [value if isinstance(value, str) else json.dumps(value)]
        if name == "failures":
            texts = [f"{each['at']}  {each.get('error_class') or '-'}  {each.get('error')}" for each in value] or ["none"]
        for number, text in enumerate(texts):
            lines.append(f"{name if number == 0 else '':<15} {printable(text, keep=_LINES)}")
    return "\n".join(lines)


def _attempt(failure: Mapping[str, Any]) -> dict[str, Any]:
    """Return one failure with its time as elsewhere: PostgreSQL writes it in the session's zone, SQLite without one."""
    at = datetime.fromisoformat(failure["at"])
    return {**failure, "at": (at if at.tzinfo else at.replace(tzinfo=UTC)).astimezone(UTC).isoformat()}


def _simple(value: Any) -> Any:
    if isinstance(value, datetime):
        return value.isoformat()
    if isinstance(value, bytes):
        return _readable(value)
    return str(value) if isinstance(value, UUID) else value


def _readable(payload: bytes) -> str:
    try:
        return payload.decode()
    except UnicodeDecodeError:
        return "base64:" + base64.b64encode(payload).decode()


def letter(row: Mapping[str, Any]) -> str:
    """Return a dead letter as one line."""
    key = f"  key {printable(row['key'])}" if row["key"] is not None else ""
    error = printable(": ".join(filter(None, (row["error_class"], row["last_error"]))))
    died = row["dead_at"].isoformat(timespec="seconds")
    message_id, topic = printable(str(row["message_id"])), printable(row["topic"])
    return f"{row['id']:>8}  {message_id}  {died}  {topic}{key}  attempts {row['attempts']}  {error}".rstrip()
