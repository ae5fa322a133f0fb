"""`leased`: a job's effects elsewhere, under a lease and an idempotency key, and their result kept."""

from __future__ import annotations

import time
from contextlib import ExitStack, contextmanager, suppress
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeVar

from outbox.inbox import Busy
from outbox.inbox import leased as held
from outbox.inbox.dedup import checked
from outbox.rq.current import as_rq_calls_it, current_job_id, handling, is_retry, log_duplicate
from outbox.tables import DEFAULT

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from sqlalchemy.orm import sessionmaker

    from outbox.inbox import Lease
    from outbox.tables import Tables

P = ParamSpec("P")
R = TypeVar("R")

_LOOK_AGAIN_S = 0.5


def leased(
    consumer: str,
    *,
    sessions: sessionmaker[Any],
    lease_s: float = 60.0,
    time_limit_s: float = 300.0,
    tables: Tables = DEFAULT,
    wait_s: float | None = None,
) -> Callable[[Callable[Concatenate[Lease, P], R]], Callable[P, R | None]]:
    """Give a function that RQ runs a lease on its job, for effects that no transaction covers: a payment, an e-mail.

        @outbox.rq.leased("payments", sessions=sessionmaker(engine))
        def charge(lease, order_id):
            return provider.charge(order_id, idempotency_key=lease.idempotency_key)["id"]

    RQ calls the function without the lease. What it returns, as JSON, is kept under the job's id: run again, the job returns
    that. While another process holds the lease, a second run waits for it, at most `wait_s` seconds (None: as long as the
    job may run, so let RQ's timeout of the job be longer than `lease_s`), and then raises `Busy`. The rest is as for
    `outbox.inbox.leased`, which says what is guaranteed; a function that returns an `rq.Retry` gives the lease back.

    Not guaranteed: that an effect happens once if the other system does not know the idempotency key again; a process that
    dies between the effect and the record of it is followed by a second call with the same key.
    Raises what `transactional` does, and what `outbox.inbox.leased` does.
    """
    checked("consumer", consumer)

    def decorate(function: Callable[Concatenate[Lease, P], R]) -> Callable[P, R | None]:
        def run(*args: P.args, **kwargs: P.kwargs) -> R | None:
            job_id = current_job_id(job)
            again = None
            lease_it = _lease(sessions, consumer, job_id, wait_s, lease_s, time_limit_s, tables)
            with suppress(_GiveBack), handling(consumer, job_id, no_failures=(_GiveBack,)) as delivery, lease_it as lease:
                if not lease.first:
                    delivery.came_to("duplicate")
                    log_duplicate(consumer, job_id)
                    kept: R = lease.result
                    return kept
                result = function(lease, *args, **kwargs)
                if is_retry(result):
                    again = result
                    raise _GiveBack
                lease.complete(result)
                delivery.came_to("handled")
                return result
            return again

        job: Callable[P, R | None] = as_rq_calls_it(function, run)
        return job

    return decorate


class _GiveBack(Exception):
    """Ends the block of a lease without a result."""


@contextmanager
def _lease(
    sessions: Any, consumer: str, job_id: str, wait_s: float | None, lease_s: float, time_limit_s: float, tables: Tables
) -> Iterator[Lease]:
    """Lease the job, waiting for another process to be done with it or to lose it."""
    began_at = time.monotonic()
    with ExitStack() as stack:
        while True:
            block = held(sessions, consumer, job_id, lease_s=lease_s, time_limit_s=time_limit_s, tables=tables)
            try:
                lease = stack.enter_context(block)
                break
            except Busy:
                if wait_s is not None and time.monotonic() - began_at >= wait_s:
                    raise
                time.sleep(_LOOK_AGAIN_S)
        yield lease
