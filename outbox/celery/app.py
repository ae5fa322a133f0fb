"""`OutboxCelery`: a Celery whose tasks are called through the outbox."""

from __future__ import annotations

import logging
from contextlib import nullcontext
from typing import Any

import celery

from outbox.celery.errors import NotThroughOutbox, NoUnitOfWork
from outbox.celery.quiet import quiet
from outbox.celery.recording import RecordingProducer
from outbox.celery.rows import event_of
from outbox.celery.task import Task
from outbox.celery.work import Outside, UnitOfWork, current
from outbox.errors import ConfigurationError

log = logging.getLogger("outbox.celery")


class OutboxCelery(celery.Celery):
    """A Celery that enqueues each call of a task in the outbox, in the transaction of `unit_of_work`.

    Takes what `celery.Celery` takes. `outside` says what a call in neither a `unit_of_work` nor `direct()` is: an error
    (`Outside.REFUSED`, the default), or published at once (`Outside.DIRECT`). What a worker itself publishes, the next
    task of a chain, callbacks, retries, goes out at once in any case, unless the task is transactional.

    What the relay publishes is what Celery would have published, apart from one property more, the message id; workers
    need neither this class nor this package. Routing and everything else is decided when the task is called.

    Not guaranteed: `after_task_publish` is sent at the call, when nothing has been published yet. The event `task-sent` is
    not sent. With `task_always_eager` tasks run at once in the caller's process, before its transaction has
    committed, and nothing is enqueued. The result backend `rpc` gets a result only if `get()` is called before it arrives.
    """

    task_cls = Task

    def __init__(self, *args: Any, outside: Outside = Outside.REFUSED, **kwargs: Any) -> None:
        self.outside = outside
        self.in_worker = False
        self._warned_of_eager = False
        super().__init__(*args, **kwargs)

    def send_task(self, name: str, args: Any = None, kwargs: Any = None, **options: Any) -> Any:
        """Call a task by its name, as Celery's `send_task` does; all tasks, chains and groups come through here.

        Raises `NoUnitOfWork` outside every unit of work, `NotThroughOutbox` for an option that publishes at once, and
        what `outbox.enqueue` raises.
        """
        work = self._destination(options)
        if not isinstance(work, UnitOfWork):
            return super().send_task(name, args, kwargs, **options)
        producer = RecordingProducer(lambda recorded: work.enqueue(event_of(name, recorded, key=work.key)))
        options |= {"producer": producer, "event_dispatcher": _NoEvents()}
        return super().send_task(name, args, kwargs, **options)

    def producer_or_acquire(self, producer: Any = None) -> Any:
        """Return a context with a producer: in a unit of work one that belongs to no connection."""
        if producer is None and isinstance(current(), UnitOfWork):
            self._warn_of_eager()
            return nullcontext(RecordingProducer(_refuse))
        context = super().producer_or_acquire(producer)
        return context if producer is not None else _Pooled(context)

    @property
    def backend(self) -> Any:
        """The result backend, which keeps off the network in a unit of work."""
        return quiet(super().backend)

    def finalize(self, auto: bool = False) -> None:  # noqa: FBT001, FBT002 - Celery's signature
        """Finish the definition of tasks. Raises `ConfigurationError` for one that `outbox.celery.Task` is not a base of."""
        super().finalize(auto=auto)
        for name, task in self._tasks.items():
            if not isinstance(task, Task):
                base = type(task).__mro__[1].__name__
                raise ConfigurationError(
                    f"task {name!r}: calls inside it would be published directly, unseen; "
                    f"write `class {base}(outbox.celery.Task)`, in place of the base that it has now"
                )

    def _destination(self, options: dict[str, Any]) -> UnitOfWork | Outside:
        where = current()
        given = [options.get(name) for name in ("producer", "publisher", "connection")]
        explicit = any(each is not None and not _is_own(each) for each in given)
        if isinstance(where, UnitOfWork):
            if explicit:
                raise NotThroughOutbox(
                    "producer=, publisher= and connection= publish at once, whatever becomes of the transaction; "
                    "leave them out, or call the task inside `with outbox.celery.direct():`"
                )
            return where
        if where is Outside.DIRECT or explicit or self.outside is Outside.DIRECT:
            return Outside.DIRECT
        if where is None and (self.in_worker or self.current_worker_task):
            return Outside.DIRECT  # what the worker itself publishes around a task: the next one of its chain, callbacks
        raise NoUnitOfWork(
            "a task was called outside a unit of work, so it would be published whether or not a transaction commits; "
            "write `with outbox.celery.unit_of_work(session):` around it, or `with outbox.celery.direct():`"
        )

    def _warn_of_eager(self) -> None:
        if self.conf.task_always_eager and not self._warned_of_eager:
            self._warned_of_eager = True
            log.warning("task_always_eager is set: tasks run inside their caller's transaction and nothing is enqueued")


class _Pooled:
    """A producer out of the pool: to pass it on, as a group does to its tasks, is not to ask for a direct publish."""

    def __init__(self, context: Any) -> None:
        self._context = context

    def __enter__(self) -> Any:
        producer = self._context.__enter__()
        producer.outbox_is_pooled = True
        return producer

    def __exit__(self, *error: object) -> Any:
        return self._context.__exit__(*error)


def _is_own(producer: Any) -> bool:
    return isinstance(producer, RecordingProducer) or getattr(producer, "outbox_is_pooled", False)


class _NoEvents:
    """Stands for the dispatcher of the event `task-sent`, which would be untrue and go to the broker."""

    @staticmethod
    def publish(*_: Any, **__: Any) -> None:
        return None


def _refuse(_recorded: Any) -> None:
    raise NotThroughOutbox("this publishes something other than a task; do it inside `with outbox.celery.direct():`")
