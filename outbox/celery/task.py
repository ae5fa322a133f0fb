"""The base of all tasks of an `OutboxCelery`."""

from __future__ import annotations

from typing import Any

import celery
from celery.exceptions import Reject

from outbox.celery.work import direct, refused


class Task(celery.Task):
    """A task whose body may call other tasks only in a unit of work, or in `direct()`.

    `retry()` publishes at once, as it must: whatever the task has done is rolled back.
    """

    abstract = True

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the body of the task."""
        if self.request.called_directly:
            return super().__call__(*args, **kwargs)
        with refused():
            return self.run(*args, **kwargs)

    def retry(self, *args: Any, **kwargs: Any) -> Any:
        """Do what Celery's `retry` does. If the retry cannot be published the message goes back to the broker.

        Celery would drop it.
        """
        try:
            with direct():
                return super().retry(*args, **kwargs)
        except Reject as error:
            if self.acks_late and not error.requeue:
                raise Reject(error.reason, requeue=True) from error
            raise
