"""What goes wrong between Celery and the outbox, and nowhere else."""

from __future__ import annotations

from outbox.errors import OutboxError


class NoUnitOfWork(OutboxError):
    """A task was called outside a unit of work, so its message would be published whether or not a transaction commits."""


class NotThroughOutbox(OutboxError):
    """What was asked for cannot be done without a connection to the broker or the result backend."""
