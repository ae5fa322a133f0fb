"""Every error that `outbox` raises on purpose, under one root."""

from __future__ import annotations


class OutboxError(Exception):
    """Something in `outbox` failed; the message says the cause and what to do."""

    def __init__(self, message: str | None = None) -> None:
        super().__init__(message or (self.__doc__ or "").partition("\n")[0])


class InvalidEvent(OutboxError, ValueError):
    """The event cannot be enqueued as it is.

    Raised in the caller's stack by `Event(...)` or `enqueue`, before anything was written.
    `field` names the part of the event that is wrong.
    """

    def __init__(self, field: str, problem: str) -> None:
        super().__init__(f"event.{field}: {problem}")
        self.field = field


class NoTransaction(OutboxError):
    """The session or connection has no transaction that the event could commit or roll back with."""


class TransactionAborted(OutboxError):
    """A database error was swallowed: the transaction can no longer commit, so nothing in it will happen."""


class MissingExtra(OutboxError, ImportError):
    """An optional dependency is needed and not installed."""


class ConfigurationError(OutboxError):
    """The configuration cannot work; nothing was started."""


class DatabaseUnavailable(OutboxError):
    """The database cannot be reached or refuses the connection."""


class SchemaError(OutboxError):
    """The database lacks the outbox tables, or they are older than this version needs."""


class BrokerUnavailable(OutboxError):
    """The broker is down, unreachable, or closed the connection; worth trying again."""


class BrokerRefused(BrokerUnavailable):
    """The broker answered and said no: wrong credentials, virtual host, or declaration."""
