"""Logging for the commands: one line per record on stderr."""

from __future__ import annotations

import logging
import sys
from datetime import UTC, datetime
from typing import Any

LEVELS = ("debug", "info", "warning", "error")
_STANDARD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime"}


def setup(level: str) -> None:
    """Send the records of `level` and above to stderr, as `time level logger message key=value ...`.

    The keys are those passed as `extra`. A traceback follows on lines of its own. Replaces the handlers of the root
    logger; the libraries below us stay at INFO even when `level` is debug.
    """
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_Formatter())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    for library in ("amqp", "kombu", "asyncio"):
        logging.getLogger(library).setLevel(max(logging.INFO, root.level))


class _Formatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        time = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
        extra = "".join(f" {key}={_value(value)}" for key, value in vars(record).items() if key not in _STANDARD)
        line = f"{time} {record.levelname} {record.name} {record.getMessage()}{extra}"
        return f"{line}\n{self.formatException(record.exc_info)}" if record.exc_info else line


def _value(value: Any) -> str:
    text = str(value)
    return repr(text) if not text or any(c.isspace() or not c.isprintable() or c in "=\"'" for c in text) else text
