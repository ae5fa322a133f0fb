"""Transactional outbox: publish events exactly when the database transaction that made them commits."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from outbox import migrations
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
    from outbox.inbox import Inbox, Message
    from outbox.tables import Tables, attach, metadata
    from outbox.waking import wake_relay

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
    "wake_relay",
]

# Where each name is, so that nothing is loaded before it is asked for: pytest imports this package with its plugin in every run.
_HOMES = {
    "enqueueing": ("enqueue", "enqueue_many"),
    "events": ("Event", "event"),
    "inbox": ("Inbox", "Message"),
    "tables": ("Tables", "attach", "metadata"),
    "waking": ("wake_relay",),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}


if not TYPE_CHECKING:  # or a type checker would believe in any name

    def __getattr__(name: str) -> Any:
        """Load a name when it is asked for, and keep it."""
        if name == "migrations":
            return import_module("outbox.migrations")
        if name not in __all__:
            raise AttributeError(f"module 'outbox' has no attribute {name!r}")
        value = globals()[name] = getattr(import_module(f"outbox.{_HOME_OF.get(name, 'errors')}"), name)
        return value
