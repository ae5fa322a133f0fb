"""`transactional`: a job's effects in the database happen once, however often RQ runs it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeVar

from outbox.inbox.busy import bound_waits, busy_on_lock_timeout
from outbox.inbox.dedup import checked, once
from outbox.points import Point, reached
from outbox.rq.current import as_rq_calls_it, current_job_id, handling, is_retry, log_duplicate
from outbox.tables import DEFAULT

if TYPE_CHECKING:
    from collections.abc import Callable

    from sqlalchemy.orm import sessionmaker

    from outbox.tables import Tables

P = ParamSpec("P")
R = TypeVar("R")


def transactional(
    consumer: str, *, sessions: sessionmaker[Any], tables: Tables = DEFAULT, lock_timeout_s: float | None = None
) -> Callable[[Callable[Concatenate[Any, P], R]], Callable[P, R | None]]:
    """Give a function that RQ runs a session, and let what it does there happen once per job.

        @outbox.rq.transactional("mail", sessions=sessionmaker(engine))
        def note_sent(session, order_id): ...

        outbox.rq.enqueue(session, "mail", note_sent, order.id)

    RQ calls the function without the session. The id of the job is recorded under `consumer` in the function's own
    transaction: a job that has done its work returns None when it is run again, and one that failed, or whose process was
    killed, starts afresh. A second run that comes while the first is under way waits for it, at most `lock_timeout_s` seconds
    on PostgreSQL (None: as long as the job may run), and then raises `Busy`. The function must not commit or roll back; if it
    returns an `rq.Retry`, it is rolled back too.

    Not guaranteed: effects elsewhere (use `leased`), and that RQ runs the job again (give it `retries`).
    Called outside of its own job it raises `ConfigurationError`: call `note_sent.__wrapped__(session, ...)` there. Raises that
    for an `async def` function too, and whatever `once` raises.
    """
    checked("consumer", consumer)

    def decorate(function: Callable[Concatenate[Any, P], R]) -> Callable[P, R | None]:
        def run(*args: P.args, **kwargs: P.kwargs) -> R | None:
            job_id = current_job_id(job)
            with handling(consumer, job_id) as delivery, busy_on_lock_timeout(), sessions() as session:
                session.begin()
                bound_waits(session, tables, lock_timeout_s=lock_timeout_s)
                with once(session, consumer, job_id, tables=tables) as first:
                    result = function(session, *args, **kwargs) if first else None
                    reached(Point.BEFORE_COMMIT)
                if is_retry(result):
                    session.rollback()
                    return result
                session.commit()
                delivery.came_to("handled" if first else "duplicate")
            reached(Point.BEFORE_ACK)
            if not first:
                log_duplicate(consumer, job_id)
            return result

        job: Callable[P, R | None] = as_rq_calls_it(function, run)
        return job

    return decorate
