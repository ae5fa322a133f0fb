"""Logging for the commands: one line per record on stderr, as text or as JSON, without passwords."""

from __future__ import annotations

import json
import logging
import math
import sys
import threading
from collections.abc import Mapping
from datetime import UTC, datetime
from types import TracebackType
from typing import Any

import click

from outbox import mention
from outbox.cli.redaction import HIDDEN, names_a_secret, redact

LEVELS = ("debug", "info", "warning", "error")
_STANDARD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime"}
_FIXED = ("ts", "level", "logger", "message", "exception")


def setup(level: str, *, form: str = "text") -> None:
    """Send the records of `level` and above to stderr.

    As `text` one is `time level logger message key=value ...`, and a traceback follows on lines of its own; as `json` it is one
    object on one line. The keys are those passed as `extra`, and those that name the message that is being handled.
    Replaces the handlers of the root logger; the libraries below us stay at INFO even when `level` is debug. What ends a thread
    or the process as an exception that nobody caught is logged too, for Python itself would print it with all that is in it.
    """
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_Json() if form == "json" else _Text())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    for library in ("amqp", "kombu", "asyncio"):
        logging.getLogger(library).setLevel(max(logging.INFO, root.level))
    sys.excepthook = _uncaught
    threading.excepthook = lambda ended: _uncaught(ended.exc_type, ended.exc_value, ended.exc_traceback)


def _uncaught(kind: type[BaseException], error: BaseException | None, traceback: TracebackType | None) -> None:
    if not issubclass(kind, SystemExit | KeyboardInterrupt):
        logging.getLogger("outbox").critical("uncaught exception", exc_info=(kind, error or kind(), traceback))


def last_words(error: Exception) -> None:
    """Say what ends the command, in the form in which it logs."""
    if any(isinstance(handler.formatter, _Json) for handler in logging.getLogger().handlers):
        logging.getLogger("outbox").critical("ended by an error", extra={"error": str(error)})
    else:
        click.echo(f"Error: {error}", err=True)


class _Formatter(logging.Formatter):
    def _parts(self, record: logging.LogRecord) -> tuple[str, dict[str, Any], str | None]:
        """Return the message, the extra keys, and the traceback, all without secrets."""
        given = {key: value for key, value in vars(record).items() if key not in _STANDARD}
        extra = {key: HIDDEN if names_a_secret(key) else _clean(value) for key, value in {**mention.current(), **given}.items()}
        exception = redact(self.formatException(record.exc_info)) if record.exc_info and record.exc_info[0] else None
        return redact(record.getMessage()), extra, exception


class _Text(_Formatter):
    def format(self, record: logging.LogRecord) -> str:
        message, extra, exception = self._parts(record)
        values = "".join(f" {key}={_value(value)}" for key, value in extra.items())
        line = f"{_time(record)} {record.levelname} {record.name} {message}{values}"
        return line if exception is None else f"{line}\n{exception}"


class _Json(_Formatter):
    def format(self, record: logging.LogRecord) -> str:
        message, extra, exception = self._parts(record)
        line = {"ts": _time(record), "level": record.levelname.lower(), "logger": record.name, "message": message}
        line |= {f"{key}_" if key in _FIXED else key: value for key, value in extra.items()}
        return json.dumps(line if exception is None else line | {"exception": exception})


def _time(record: logging.LogRecord) -> str:
    return datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _clean(value: Any) -> Any:
    """Return what JSON can hold, and no secrets: texts, numbers, and lists and dicts of these; anything else as a text."""
    match value:
        case None | bool() | int():
            return value
        case float():
            return value if math.isfinite(value) else str(value)
        case Mapping():
            return {str(key): HIDDEN if names_a_secret(str(key)) else _clean(each) for key, each in value.items()}
        case list() | tuple():
            return [_clean(each) for each in value]
        case bytes() | bytearray() | memoryview():
            return f"{len(value)} bytes"
        case _:
            return redact(str(value))


def _value(value: Any) -> str:
    text = str(value)
    return repr(text) if not text or any(c.isspace() or not c.isprintable() or c in "=\"'" for c in text) else text
