"""What follows a task, its callbacks and the next task of its chain, enqueued in the task's own transaction.

Celery publishes them after the task has returned. A worker that dies between the commit and that publish would leave a
chain that never goes on, because the task, when it is delivered again, is a duplicate.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from celery import group
from celery.canvas import Signature, _chain, maybe_signature
from celery.canvas import _chord as chord

from outbox.celery.work import UnitOfWork, current

if TYPE_CHECKING:
    from outbox.celery.running import OnceTask


class Continuation:
    """Enqueues what follows one run of a task, and keeps Celery from publishing it a second time."""

    def __init__(self, task: OnceTask) -> None:
        self._task = task
        self._request = task.request
        self._callbacks = self._chain = False

    def enqueue(self, returned: Any) -> None:
        """Enqueue what follows, given what the task has returned. Left to Celery: chords, and all of it on an app of another kind."""
        from outbox.celery.app import OutboxCelery

        request = self._request
        if request.is_eager or not isinstance(self._task.app, OutboxCelery) or not isinstance(current(), UnitOfWork):
            return
        callbacks = [self._signature(each) for each in request.callbacks or ()]
        if callbacks and all(map(_is_plain, callbacks)):
            self._call(callbacks, returned)
            self._callbacks = True
        following = [self._signature(each) for each in (request.chain or ())[-1:]]
        if following and _is_plain(following[0]):
            following[0].apply_async((returned,), chain=request.chain[:-1], **self._family())
            self._chain = True

    def enqueued(self) -> None:
        """Tell Celery, once the transaction has committed, that there is nothing left to publish."""
        if self._callbacks:
            self._request.callbacks = None
        if self._chain:
            self._request.chain = None

    def _call(self, callbacks: list[Signature], returned: Any) -> None:
        """Call callbacks as Celery does: several that are no groups as one group."""
        groups = [each for each in callbacks if isinstance(each, group)]
        others = [each for each in callbacks if not isinstance(each, group)]
        together = [group(others, app=self._task.app)] if len(callbacks) > 1 and others else others
        for each in (*groups, *together):
            each.apply_async((returned,), **self._family())

    def _signature(self, each: Any) -> Signature:
        return maybe_signature(each, app=self._task.app)

    def _family(self) -> dict[str, Any]:
        request = self._request
        inherits = self._task.app.conf.task_inherit_parent_priority
        priority = request.delivery_info.get("priority") if inherits else None
        return {"parent_id": request.id, "root_id": request.root_id or request.id, "priority": priority}


def _is_plain(signature: Signature) -> bool:
    return not isinstance(signature, chord | _chain)
