"""Transactional outbox: publish events exactly when the database transaction that made them commits."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from outbox.enqueueing import enqueue, enqueue_many
from outbox.errors import (
    BrokerRefused,
    BrokerUnavailable,
    ConfigurationError,
    DatabaseUnavailable,
    InvalidEvent,
    MissingExtra,
    NoTransaction,
    OutboxError,
    SchemaError,
    TransactionAborted,
)
from outbox.events import Event, event
from outbox.tables import Tables, attach, metadata

if TYPE_CHECKING:
    from outbox import migrations
    from outbox.inbox import Inbox, Message

__version__ = "0.1.0"

__all__ = [
    "BrokerRefused",
    "BrokerUnavailable",
    "ConfigurationError",
    "DatabaseUnavailable",
    "Event",
    "Inbox",
    "InvalidEvent",
    "Message",
    "MissingExtra",
    "NoTransaction",
    "OutboxError",
    "SchemaError",
    "Tables",
    "TransactionAborted",
    "__version__",
    "attach",
    "enqueue",
    "enqueue_many",
    "event",
    "metadata",
    "migrations",
]


if not TYPE_CHECKING:  # or a type checker would believe in any name

    def __getattr__(name: str) -> Any:
        """Load what a producer does not need only when it is asked for."""
        if name == "migrations":
            return import_module("outbox.migrations")
        if name in ("Inbox", "Message"):
            return getattr(import_module("outbox.inbox"), name)
        raise AttributeError(f"module 'outbox' has no attribute {name!r}")
