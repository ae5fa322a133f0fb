"""Celery through the outbox: tasks called in a transaction, and tasks that have their effects once."""

from __future__ import annotations

from outbox.errors import MissingExtra

try:
    import celery as _celery
except ImportError as error:
    raise MissingExtra("outbox.celery needs Celery; pip install 'outbox-relay[celery]'") from error

from outbox.celery import starting
from outbox.celery.app import OutboxCelery
from outbox.celery.chords import launch
from outbox.celery.errors import NotThroughOutbox, NoUnitOfWork
from outbox.celery.leased import LeasedTask
from outbox.celery.rows import TOPICS
from outbox.celery.task import Task
from outbox.celery.transactional import TransactionalTask
from outbox.celery.work import Outside, UnitOfWork, direct, unit_of_work

__all__ = [
    "TOPICS",
    "LeasedTask",
    "NoUnitOfWork",
    "NotThroughOutbox",
    "OutboxCelery",
    "Outside",
    "Task",
    "TransactionalTask",
    "UnitOfWork",
    "direct",
    "launch",
    "unit_of_work",
]

del _celery, starting
