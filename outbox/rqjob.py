"""What a job for RQ looks like in a row of the outbox: JSON, written by the application and read by the relay."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from outbox.encoding import encode
from outbox.errors import OutboxError

SCHEME = "rq+"
"""What a relay's broker URL begins with when it leads to RQ's queues on a Redis."""

CONTENT_TYPE = "application/vnd.outbox.rq-job+json"
TOPIC_PREFIX = "rq."
HEADERS_IN_META = "outbox-headers"
"""Where a job's `meta` holds the headers of its message, such as the trace that it was enqueued in."""


class NotAJob(OutboxError):
    """The message is no job for RQ; only jobs can be enqueued there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RqJob:
    """A call of the function with the dotted name `function`, and how RQ is to treat it.

    Times in seconds; None leaves what RQ does by default. `retries` is how often RQ runs the job again after a failure.
    """

    queue: str
    function: str
    args: list[Any] = field(default_factory=list)
    kwargs: dict[str, Any] = field(default_factory=dict)
    timeout_s: int | None = None
    result_ttl_s: int | None = None
    failure_ttl_s: int | None = None
    description: str | None = None
    meta: dict[str, Any] = field(default_factory=dict)
    retries: int = 0
    retry_intervals_s: list[int] = field(default_factory=list)
    at_front: bool = False

    def encoded(self) -> bytes:
        """Return it as JSON. Raises `InvalidEvent` for what no JSON can carry."""
        return encode(asdict(self))


_NAMES = {each.name for each in fields(RqJob)}


def read(content_type: str, payload: bytes) -> RqJob:
    """Return the job that a message holds. Raises `NotAJob`, also for one of a newer version that this one cannot read."""
    if content_type != CONTENT_TYPE:
        raise NotAJob(f"the message is no job for RQ: its content type is {content_type!r}; enqueue jobs with outbox.rq.enqueue")
    try:
        value = json.loads(payload)
        unknown = set(value) - _NAMES
        job = RqJob(**{name: value[name] for name in value if name in _NAMES})
    except (ValueError, TypeError) as error:
        raise NotAJob(f"the message is no job for RQ: {error}") from error
    if unknown:
        raise NotAJob(f"the job has parts that this relay does not know ({', '.join(sorted(unknown))}); update the relay")
    return job
