"""The job that RQ is running in this process, and the function that it is to call."""

from __future__ import annotations

import inspect
import logging
from contextlib import contextmanager
from functools import wraps
from typing import TYPE_CHECKING, Any

from outbox.errors import ConfigurationError, MissingExtra
from outbox.rqjob import HEADERS_IN_META, TOPIC_PREFIX
from outbox.tracing.processing import processing

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import ModuleType

    from outbox.tracing.processing import Delivery

log = logging.getLogger("outbox.rq")


def current_job_id(function: Callable[..., Any]) -> str:
    """Return the id of the job whose function this is.

    Raises `ConfigurationError` outside of it: a function that another job calls would be recorded under that job's id, and
    dropped the second time that it is called.
    """
    job = _rq().get_current_job()
    if job is None or inspect.unwrap(job.func) is not inspect.unwrap(function):
        name = getattr(function, "__qualname__", repr(function))
        raise ConfigurationError(
            f"{name} runs as an RQ job of its own, and this is not one; enqueue it, or call {name}.__wrapped__ with what it is given"
        )
    if job.repeats_left is not None:
        raise ConfigurationError("a job that repeats has one id for all of its runs, so that only the first would count")
    return str(job.id)


@contextmanager
def handling(consumer: str, job_id: str, *, no_failures: tuple[type[BaseException], ...] = ()) -> Iterator[Delivery]:
    """Have a span over the current job, where OpenTelemetry is set up."""
    job = _rq().get_current_job()
    carried = job.meta.get(HEADERS_IN_META)
    headers = carried if isinstance(carried, dict) else {}
    topic = f"{TOPIC_PREFIX}{job.origin}"
    with processing(headers, topic=topic, message_id=job_id, consumer=consumer, system="rq", no_failures=no_failures) as delivery:
        yield delivery


def as_rq_calls_it(function: Callable[..., Any], run: Any) -> Any:
    """Let `run` look like the function without its first parameter, under the name that RQ imports it by.

    Raises `ConfigurationError` for an `async def` function.
    """
    if inspect.iscoroutinefunction(function):
        raise ConfigurationError(
            f"{function.__qualname__} is async def; RQ runs each job in an event loop of its own: use a plain def"
        )
    signature = inspect.signature(function)
    run = wraps(function)(run)
    run.__signature__ = signature.replace(parameters=list(signature.parameters.values())[1:])
    return run


def log_duplicate(consumer: str, job_id: str) -> None:
    """Say that a job was run again for nothing."""
    log.info("job was done before; nothing repeated", extra={"consumer": consumer, "message_id": job_id})


def is_retry(result: object) -> bool:
    """Tell whether a job returned a wish to be run again."""
    return isinstance(result, _rq().Retry)


def _rq() -> ModuleType:
    try:
        import rq
    except ImportError as missing:
        raise MissingExtra("jobs for RQ need the package rq; pip install 'outbox-relay[rq]'") from missing
    return rq
