"""What transactional and leased tasks share: their settings, and what becomes of one that cannot run now."""

from __future__ import annotations

import logging
import weakref
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, ClassVar

from celery.exceptions import Ignore, Reject, Retry

from outbox.backoff import Backoff
from outbox.celery.rows import topic_of
from outbox.celery.task import Task
from outbox.celery.work import direct
from outbox.errors import ConfigurationError
from outbox.inbox.dedup import checked
from outbox.inbox.failing import is_database_away, is_not_its_fault
from outbox.inbox.settling import BUSY
from outbox.tables import DEFAULT
from outbox.tracing.processing import processing
from outbox.tracing.server import server_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from outbox.tables import Tables
    from outbox.tracing.processing import Delivery

log = logging.getLogger("outbox.celery")

AWAY = Backoff(first_s=5, ceiling_s=5, floor=0.5)
_LATE = {
    "acks_late": "a worker that dies in the middle of it has acknowledged it already, and it is lost",
    "reject_on_worker_lost": "it is acknowledged when its process dies, and lost",
}

registered: weakref.WeakSet[type[OnceTask]]


class Duplicate(Ignore):
    """The task was handled before."""


class OnceTask(Task):
    """A task that is known again by its id, which Celery keeps through retries and redeliveries.

    `sessions`   the `sessionmaker`, or a function that returns a new `Session`: an attribute of a base class of yours,
                 or an option of `@app.task`.
    `consumer`   the name that its runs are recorded under, by default that of the task. Never change it, or what is
                 still in the broker counts as new.
    `tables`     what `outbox.attach` returned, when the outbox tables are not the default ones.

    It is acknowledged late and goes back to the broker when its process is lost; an app in which either is switched off
    for such a task does not start.
    """

    abstract = True
    acks_late = True
    reject_on_worker_lost = True
    sessions: ClassVar[Callable[[], Any] | None] = None
    consumer: ClassVar[str | None] = None
    tables: ClassVar[Tables] = DEFAULT

    @classmethod
    def on_bound(cls, app: Any) -> None:
        """Raise `ConfigurationError` for settings with which work would be lost or done twice."""
        super().on_bound(app)
        for setting, consequence in _LATE.items():
            if not getattr(cls, setting):
                raise ConfigurationError(
                    f"task {cls.name!r}: {setting} is off, so {consequence}; "
                    f"write `@app.task(base=..., {setting}=True)`, and see that task_annotations does not say otherwise"
                )
        if cls.sessions is None:
            raise ConfigurationError(
                f"task {cls.name!r} has no sessions; write `sessions = sessionmaker(engine)` in its base class"
            )
        if hasattr(getattr(cls.sessions, "class_", None), "run_sync"):
            raise ConfigurationError(f"task {cls.name!r}: Celery runs plain functions; give it a plain sessionmaker")
        checked("consumer", cls.consumer or cls.name)
        registered.add(cls)

    @property
    def recorded_as(self) -> str:
        """The consumer's name."""
        return self.consumer or str(self.name)

    def _try_once(self, args: Any, kwargs: Any) -> Any:
        """Run it, unless it was run before; if that fails by no fault of its own, put it off."""
        try:
            with self._traced() as delivery:
                result = self._once(args, kwargs)
                delivery.came_to("handled")
            return result
        except Exception as error:
            put_off = self._put_off(error)
            if put_off is error:
                raise
            raise put_off from error

    def _once(self, args: Any, kwargs: Any) -> Any:
        raise NotImplementedError

    @contextmanager
    def _traced(self) -> Iterator[Delivery]:
        request = self.request
        with processing(
            request.headers or {},
            topic=topic_of(str(self.name)),
            message_id=str(request.id),
            consumer=self.recorded_as,
            system=server_of(str(self.app.conf.broker_url or "")).system,
            no_failures=(Ignore, Retry, Reject),
        ) as delivery:
            try:
                yield delivery
            except Duplicate:
                delivery.came_to("duplicate")
                raise

    def _duplicate(self) -> Ignore:
        log.info("a duplicate; it was handled before", extra={"consumer": self.recorded_as, "task_id": self.request.id})
        return Duplicate(f"{self.recorded_as!r} has handled {self.request.id} before")

    def _put_off(self, error: Exception) -> Exception:
        """Return what to raise instead of `error`: when no fault of the task's own, the task is called again a little later."""
        if self.request.is_eager or not is_not_its_fault(error):
            return error
        delay_s = _delay_s(error)
        # Not by rejecting it: a quorum queue drops what came back to it too often.
        again = self.signature_from_request(self.request, countdown=delay_s, retries=self.request.retries)
        try:
            with direct():
                again.apply_async()
            put_off: Exception = Retry(exc=error, when=delay_s, sig=again)
        except Exception as broken:  # noqa: BLE001 - whatever a broker that is away raises
            put_off = Reject(broken, requeue=True)
        return put_off


registered = weakref.WeakSet()


def _delay_s(error: Exception) -> float:
    if is_database_away(error):
        return AWAY.delay_s(1)
    # A lease may end sooner than it says.
    lease_s = getattr(error, "retry_after_s", None) or 0.0
    return max(BUSY.delay_s(1), min(lease_s, AWAY.ceiling_s))
