"""How a job is to be published, and how RQ is to run it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from outbox.errors import InvalidEvent
from outbox.rq.calls import check_json

if TYPE_CHECKING:
    from collections.abc import Callable
    from datetime import datetime, timedelta
    from uuid import UUID


@dataclass(frozen=True, slots=True, kw_only=True)
class JobOptions:
    """How a job is to be published and run. Times in seconds; None leaves RQ's own default.

    `job_id`            a UUID or its text; made at `enqueue` when None. RQ knows the job by it.
    `key`               jobs of one key are put into RQ's queue in order. Several workers may still run them at the same time.
    `delay`             put it there no sooner than this after the insert, by the database's clock.
    `available_at`      or no sooner than this moment, an aware datetime.
    `timeout_s`         how long the job may run: RQ's 180 when None, -1 for no limit.
    `retries`           how often RQ runs it again after it failed, or after its worker died. With 0 a job whose worker
                        dies is not run again: it is moved to RQ's failed jobs.
    `retry_intervals_s` pauses before each of these. Needs `rq worker --with-scheduler`, or the job is never run again.
    `result_ttl_s`      how long RQ keeps the result, and knows the job's id: RQ's 500 when None, -1 for ever.
    `failure_ttl_s`     how long RQ keeps a failed job: a year when None.
    `description`       what RQ logs; the name of the function when None, so that no argument reaches a log.
    `meta`              what the function finds in `rq.get_current_job().meta`.
    `at_front`          puts the job before those that wait.

    Raises `InvalidEvent` for values that RQ would refuse.
    """

    job_id: UUID | str | None = None
    key: str | None = None
    delay: timedelta | None = None
    available_at: datetime | None = None
    timeout_s: int | None = None
    retries: int = 3
    retry_intervals_s: Sequence[int] = ()
    result_ttl_s: int | None = None
    failure_ttl_s: int | None = None
    description: str | None = None
    meta: Mapping[str, Any] = field(default_factory=dict)
    at_front: bool = False

    def __post_init__(self) -> None:
        _require("timeout_s", self.timeout_s, lambda value: value > 0 or value == -1, "a number of seconds, or -1 for no limit")
        for name in ("result_ttl_s", "failure_ttl_s"):
            _require(name, getattr(self, name), lambda value: value >= -1, "a number of seconds, or -1 for ever")
        _require("retries", self.retries, lambda value: value >= 0, "a number")
        for interval_s in self.retry_intervals_s:
            _require("retry_intervals_s", interval_s, lambda value: value >= 0, "numbers of seconds")
        if not isinstance(self.meta, Mapping):
            raise InvalidEvent("meta", f"must be a dict, not {type(self.meta).__qualname__}")
        check_json("meta", dict(self.meta))


def _require(name: str, value: object, holds: Callable[[int], bool], wanted: str) -> None:
    if value is None and name != "retries":
        return
    if not isinstance(value, int) or isinstance(value, bool) or not holds(value):
        raise InvalidEvent(name, f"is {value!r}; write {wanted}")
