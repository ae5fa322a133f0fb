"""A task whose effects are in one database: they commit together with the record that it has run."""

from __future__ import annotations

from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, ClassVar

from celery.exceptions import Ignore

from outbox.celery.continuing import Continuation
from outbox.celery.running import OnceTask
from outbox.celery.work import unit_of_work
from outbox.errors import NoTransaction
from outbox.inbox.busy import bound_waits, busy_on_lock_timeout
from outbox.inbox.dedup import once
from outbox.points import Point, reached

if TYPE_CHECKING:
    from collections.abc import Iterator

    from sqlalchemy.orm import Session

_session: ContextVar[Any] = ContextVar("outbox_celery_session", default=None)


class TransactionalTask(OnceTask):
    """A task that has its effects through `self.session`, once for each task id.

        class ShopTask(outbox.celery.TransactionalTask):
            sessions = sessionmaker(engine)

        @app.task(base=ShopTask, bind=True)
        def ship(self, order_id):
            self.session.add(Shipment(order_id=order_id))

    Before the body runs its task id is recorded in the same transaction; Celery acknowledges the message after the commit.
    A duplicate ends as `celery.exceptions.Ignore`: no effect, no callbacks, no next task of its chain. An exception
    rolls everything back, and so does `self.retry()`, whose next try runs; `Ignore`, as raised by `self.replace()`, commits.
    Tasks that the body calls go through the outbox, in the same transaction; so do callbacks and the next task of a chain
    when the app is an `OutboxCelery`, apart from chords. The body must not commit or roll back.

    When the database is away, asks for another try, or another transaction holds the task or a lock that it waits for
    (longer than `lock_timeout_s`, on PostgreSQL), the task is called again a few seconds later, and no retry is counted.

    Not guaranteed: effects elsewhere than in the database (see `LeasedTask`); that a result is stored and a chord
    goes on when the worker dies right after the commit; and that a task is tried again that raised an exception or was
    ended by its hard `time_limit`: Celery acknowledges it as failed. Name what to try again in `autoretry_for`. (With
    `acks_on_failure=False` it would be rejected, and without a dead letter exchange dropped.)
    """

    abstract = True
    lock_timeout_s: ClassVar[float | None] = 2.0

    @property
    def session(self) -> Session:
        """The session of this run. Raises `NoTransaction` outside of one."""
        session: Session | None = _session.get()
        if session is None:
            raise NoTransaction("self.session is there only while the task runs; call the task, not its run()")
        return session

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the body in a transaction; called as a plain function, which has no task id, without the record."""
        if self.request.called_directly:
            with self._transaction() as session, unit_of_work(session, tables=self.tables):
                return self.run(*args, **kwargs)
        return self._try_once(args, kwargs)

    def _once(self, args: Any, kwargs: Any) -> Any:
        ignored, returned, continuation = None, None, Continuation(self)
        with (
            busy_on_lock_timeout(),
            self._transaction() as session,
            once(session, self.recorded_as, self.request.id, tables=self.tables) as first,
        ):
            if first:
                with unit_of_work(session, tables=self.tables):
                    try:
                        returned = self.run(*args, **kwargs)
                        continuation.enqueue(returned)
                    except Ignore as error:
                        ignored = error
            reached(Point.BEFORE_COMMIT)
        reached(Point.BEFORE_ACK)
        if not first:
            raise self._duplicate()
        if ignored is not None:
            raise ignored
        continuation.enqueued()
        return returned

    @contextmanager
    def _transaction(self) -> Iterator[Session]:
        sessions: Any = type(self).sessions  # a plain function would be bound to self
        with sessions() as session, session.begin():
            bound_waits(session, self.tables, lock_timeout_s=self.lock_timeout_s)
            token = _session.set(session)
            try:
                yield session
            finally:
                _session.reset(token)
