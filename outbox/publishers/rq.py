"""Makes jobs in RQ's queues on Redis, one at a time, each unless its id is there already.

`confirmed` means that Redis has replied: what it had not yet written to its append-only file, or not yet replicated at a
failover, can still be lost.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from outbox.errors import BrokerUnavailable, ConfigurationError, MissingExtra
from outbox.publishers.base import Published
from outbox.publishers.flight import CONFIRMED, Flight
from outbox.publishers.rq_redis import LOST, ails, describe, dial, failure
from outbox.rqjob import HEADERS_IN_META, NotAJob, read
from outbox.states import Outcome, Verdict

try:
    import redis
    import rq
    from rq.exceptions import DuplicateJobError
    from rq.job import Job
    from rq.serializers import JSONSerializer
except ImportError as missing:
    raise MissingExtra("jobs for RQ need the package rq; pip install 'outbox-relay[rq]'") from missing

if TYPE_CHECKING:
    from collections.abc import Sequence

    from outbox.outgoing import Outgoing
    from outbox.publishers.base import Control
    from outbox.rqjob import RqJob


class RqPublisher:
    """Implements `Publisher` for `rq+redis://`, `rq+rediss://` and `rq+unix://`.

    `?serializer=json` in the URL writes jobs for workers that run with `--serializer json`. Without, they are written by
    RQ's own default, as its workers expect, which pickles: the function's name, and arguments that came as JSON.
    """

    blocked = False

    def __init__(self, url: str, *, timeout_s: float) -> None:
        self._url = url
        self._timeout_s = timeout_s
        self._redis, self._serializer = dial(url, timeout_s=timeout_s)
        self._queues: dict[str, rq.Queue] = {}
        self._connected = False

    def connect(self) -> None:
        """Connect, if not connected."""
        if self._connected:
            return
        try:
            self._redis, self._serializer = dial(self._url, timeout_s=self._timeout_s)  # what of the URL is in files may be new
            self._redis.ping()
        except ConfigurationError as error:
            raise BrokerUnavailable(f"broker: {error}") from error
        except LOST as error:
            self.close()
            raise failure(error) from error
        self._connected = True

    def publish(self, rows: Sequence[Outgoing], control: Control) -> Published:
        """Publish a batch; see `Publisher`. A job whose making raised is unknown."""
        flight = Flight(rows)
        if not self._connected:
            return Published(flight.end(), BrokerUnavailable("broker: not connected"))
        lost = None
        while flight.waiting and control.may_send():
            row = flight.sent()
            try:
                flight.answered(row, self._send(row))
            except LOST as error:
                lost = BrokerUnavailable(describe(error))
                self.close()
                break
            control.progress()
        return Published(flight.end(), lost)

    def tick(self) -> None:
        """Notice a server that has gone while there is nothing to publish."""
        if not self._connected:
            return
        try:
            self._redis.ping()
        except LOST as error:
            self.close()
            raise BrokerUnavailable(describe(error)) from error

    def close(self) -> None:
        """Close the connection; may be called twice."""
        self._connected = False
        self._queues.clear()
        self._redis.close()

    def _send(self, row: Outgoing) -> Verdict:
        try:
            call = read(row.content_type, row.payload)
            queue = self._queue(call.queue)
            job = _job(queue, call, row)
        except (NotAJob, TypeError, ValueError) as error:
            return Verdict(Outcome.UNPUBLISHABLE, str(error), type(error).__name__)
        try:
            queue.enqueue_job(job, at_front=call.at_front, unique=True)
        except DuplicateJobError:  # published before, and the reply or the relay was lost
            return CONFIRMED
        except redis.DataError as error:
            return Verdict(Outcome.UNPUBLISHABLE, str(error), type(error).__name__)
        except redis.ResponseError as error:
            return self._refused(job, error)
        return CONFIRMED

    def _queue(self, name: str) -> rq.Queue:
        if name not in self._queues:
            serializer = JSONSerializer if self._serializer == "json" else None
            self._queues[name] = rq.Queue(name, connection=self._redis, serializer=serializer)
        return self._queues[name]

    def _refused(self, job: Job, error: redis.ResponseError) -> Verdict:
        """Tell whose fault an answer is. Raises it when it is the server's as a whole."""
        if ails(error):
            raise error
        # A script that fails on its way leaves what it has done: a job that is in no queue, and would count as a duplicate.
        if self._redis.hget(job.key, "enqueued_at") == _enqueued_at(job):
            self._redis.delete(job.key)
        outcome = Outcome.REJECTED if "WRONGTYPE" in str(error) else Outcome.REFUSED
        return Verdict(outcome, describe(error), type(error).__name__)


def _job(queue: rq.Queue, call: RqJob, row: Outgoing) -> Job:
    return queue.create_job(
        call.function,
        args=call.args,
        kwargs=call.kwargs,
        job_id=str(row.message_id),
        timeout=call.timeout_s,
        result_ttl=call.result_ttl_s,
        failure_ttl=call.failure_ttl_s,
        description=call.description or call.function,
        meta=call.meta | ({HEADERS_IN_META: dict(row.headers)} if row.headers else {}),
        retry=rq.Retry(call.retries, interval=call.retry_intervals_s or 0) if call.retries else None,
    )


def _enqueued_at(job: Job) -> bytes:
    return str(job.to_dict().get("enqueued_at")).encode()
