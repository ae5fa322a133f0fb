"""A task whose effect is outside the database: a payment, an e-mail, a call over HTTP."""

from __future__ import annotations

from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, ClassVar

from celery.exceptions import Ignore
from sqlalchemy.orm import sessionmaker

from outbox.celery.continuing import Continuation
from outbox.celery.running import OnceTask
from outbox.celery.work import unit_of_work
from outbox.errors import ConfigurationError, NoTransaction
from outbox.inbox.leasing import leased
from outbox.points import Point, reached

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from outbox.inbox.lease import Lease

_lease: ContextVar[Lease | None] = ContextVar("outbox_celery_lease", default=None)


class LeasedTask(OnceTask):
    """A task that holds a lease on its task id, as `self.lease`, while it has an effect that no transaction covers.

        class PaymentTask(outbox.celery.LeasedTask):
            sessions = sessionmaker(engine)

        @app.task(base=PaymentTask, bind=True)
        def charge(self, order_id, amount):
            return provider.charge(amount, idempotency_key=self.lease.idempotency_key)

    What it returns (anything JSON) is kept as the result. A duplicate ends as `celery.exceptions.Ignore`: the body does not
    run, nor do callbacks and the next task of its chain, which on an `OutboxCelery` are enqueued together with the result.
    While another worker holds the task, it is called again a few seconds later, and no retry is counted. An exception and
    `self.retry()` give the lease back.

    The lease lasts `lease_s` seconds, and is renewed for as long as the body runs and the last `self.lease.progress()`, or the
    start, is not longer ago than `lease_limit_s`. Give the task a `time_limit` that is no longer than that. `sessions`
    must be a `sessionmaker`; its pool needs room for two connections for each task that runs at the same time.

    Not guaranteed: that the body runs once. A worker that dies between the effect and the end of the task leaves it to
    another, which runs it again with the same `idempotency_key`: it is for the other system to know that key.
    """

    abstract = True
    sessions: ClassVar[sessionmaker[Any] | None] = None
    lease_s: ClassVar[float] = 60.0
    lease_limit_s: ClassVar[float] = 300.0

    @classmethod
    def on_bound(cls, app: Any) -> None:
        """Raise `ConfigurationError` for settings with which work would be lost or done twice."""
        super().on_bound(app)
        if not isinstance(cls.sessions, sessionmaker):
            raise ConfigurationError(f"task {cls.name!r}: a lease needs a sessionmaker, not {cls.sessions!r:.80}")

    @property
    def lease(self) -> Lease:
        """The lease of this run. Raises `NoTransaction` outside of one."""
        lease = _lease.get()
        if lease is None:
            raise NoTransaction("self.lease is there only while the task runs in a worker or by apply()")
        return lease

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the body with a lease; called as a plain function, which has no task id, without one."""
        if self.request.called_directly:
            return super().__call__(*args, **kwargs)
        return self._try_once(args, kwargs)

    def _once(self, args: Any, kwargs: Any) -> Any:
        ignored, returned, continuation = None, None, Continuation(self)
        with self._leased() as lease:
            first = lease.first
            if first:
                try:
                    returned = self._run(lease, args, kwargs)
                except Ignore as error:
                    ignored = error
                else:
                    self._finish(lease, returned, continuation)
        reached(Point.BEFORE_ACK)
        if not first:
            raise self._duplicate()
        if ignored is not None:
            raise ignored
        continuation.enqueued()
        return returned

    def _leased(self) -> AbstractContextManager[Lease]:
        limits = {"lease_s": self.lease_s, "time_limit_s": self.lease_limit_s}
        return leased(self._made_by(), self.recorded_as, self.request.id, **limits, tables=self.tables)

    def _run(self, lease: Lease, args: Any, kwargs: Any) -> Any:
        token = _lease.set(lease)
        try:
            return super().__call__(*args, **kwargs)
        finally:
            _lease.reset(token)

    def _finish(self, lease: Lease, returned: Any, continuation: Continuation) -> None:
        """Keep the result, and enqueue what follows, in one transaction."""
        with self._made_by().begin() as session, unit_of_work(session, tables=self.tables):
            lease.complete(returned, session=session)
            continuation.enqueue(returned)

    def _made_by(self) -> sessionmaker[Any]:
        assert self.sessions is not None  # noqa: S101 - checked when it was bound
        return self.sessions
