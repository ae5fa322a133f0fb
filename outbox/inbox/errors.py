"""What can be wrong with one delivery; each is an `OutboxError`."""

from __future__ import annotations

from outbox.errors import OutboxError


class InvalidMessageId(OutboxError, ValueError):
    """The message id, or the consumer's name, is not a text of 1 to 255 characters that a database can store."""


class UnusableMessage(OutboxError):
    """The delivery cannot be read as a message."""


class NoHandler(OutboxError):
    """No handler is registered for the message's topic."""


class Busy(OutboxError):
    """Another worker holds the message, or a lock that its handler needs: worth trying again a little later.

    `retry_after_s` is how long the other worker's lease still runs, in seconds, where there is one; it may end sooner.
    """

    def __init__(self, message: str | None = None, *, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class Permanent(OutboxError):
    """A handler raises this, or a subclass, for a message that no further try can help: it goes to the dead letters at once."""


class TimeLimitExceeded(OutboxError):
    """The handler has reached its soft time limit, or its hard one after which it was given up."""


class LeaseLost(OutboxError):
    """The lease on the message has gone to another worker: whatever this one wants to write down comes too late."""


class HandlersStuck(OutboxError):
    """Too many handlers hang past their time limits; the process has to be started again."""


class ProcessDied(OutboxError):
    """The process was killed, or lost its machine, each time that it tried to handle the message."""


class Unfinished(OutboxError):
    """A leased handler has begun the message and was never heard of again: only leased handling can take it over."""


class InvalidResult(OutboxError, ValueError):
    """The result of a leased handler is nothing that can be kept as JSON."""
