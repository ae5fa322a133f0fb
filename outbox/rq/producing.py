"""`enqueue`: a job for RQ, written in the caller's transaction."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, overload

from outbox.enqueueing import enqueue as enqueue_event
from outbox.errors import InvalidEvent
from outbox.events import Event
from outbox.rq.calls import check_call, check_json, function_name
from outbox.rq.options import JobOptions
from outbox.rqjob import CONTENT_TYPE, TOPIC_PREFIX, RqJob
from outbox.tables import DEFAULT, Tables

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine
    from uuid import UUID

    from sqlalchemy.ext.asyncio import AsyncConnection

    from outbox.targets import Target

_NO_TOPIC_WORD = re.compile(r"[^A-Za-z0-9_-]")


_USUAL = JobOptions()


@overload
def enqueue(
    target: Target, queue: str, func: Callable[..., Any] | str, /, *args: Any,
    options: JobOptions = ..., tables: Tables = ..., **kwargs: Any,
) -> UUID: ...  # fmt: skip
@overload
def enqueue(
    target: AsyncConnection, queue: str, func: Callable[..., Any] | str, /, *args: Any,
    options: JobOptions = ..., tables: Tables = ..., **kwargs: Any,
) -> Coroutine[Any, Any, UUID]: ...  # fmt: skip
def enqueue(
    target: Target | AsyncConnection,
    queue: str,
    func: Callable[..., Any] | str,
    /,
    *args: Any,
    options: JobOptions = _USUAL,
    tables: Tables = DEFAULT,
    **kwargs: Any,
) -> UUID | Coroutine[Any, Any, UUID]:
    """Have RQ call `func(*args, **kwargs)` from `queue`, once the caller's transaction has committed; return the job's id.

        outbox.rq.enqueue(session, "mail", send_invoice, order.id, language="de")

    `target`, `tables` and what is guaranteed: as for `outbox.enqueue`. `func` is a function that RQ's worker can import,
    or its dotted name. Every argument but `options` and `tables` is the function's. They travel as JSON: what would not
    arrive as it was is refused here, and nothing is ever pickled by this library.

    The job is there once per id for as long as RQ knows that id (see `result_ttl_s`). A relay that was killed may make it
    again after that, and RQ runs a job again whose worker died: let `transactional` or `leased` drop the second run.

    Raises what `outbox.enqueue` does; among it `InvalidEvent` for a function that RQ could not import, for arguments that
    it does not take, and for those that are not None, a bool, a number, a str, or a list or dict of these.
    """
    name = function_name(func)
    check_call(func, args, kwargs)
    check_json("args", list(args))
    check_json("kwargs", kwargs)
    return enqueue_event(target, _event(queue, name, list(args), kwargs, options), tables=tables)


def _event(queue: Any, name: str, args: list[Any], kwargs: dict[str, Any], options: JobOptions) -> Event:
    if not isinstance(queue, str) or not queue:
        raise InvalidEvent("queue", f"must be the name of an RQ queue, not {queue!r}")
    job = RqJob(
        queue=queue,
        function=name,
        args=args,
        kwargs=kwargs,
        timeout_s=options.timeout_s,
        result_ttl_s=options.result_ttl_s,
        failure_ttl_s=options.failure_ttl_s,
        description=options.description,
        meta=dict(options.meta),
        retries=options.retries,
        retry_intervals_s=list(options.retry_intervals_s),
        at_front=options.at_front,
    )
    return Event(
        topic=TOPIC_PREFIX + ".".join(_NO_TOPIC_WORD.sub("_", word) or "_" for word in queue.split(".")),
        payload=job.encoded(),
        content_type=CONTENT_TYPE,
        type="rq.job",
        key=options.key,
        delay=options.delay,
        available_at=options.available_at,
        message_id=options.job_id,
    )
