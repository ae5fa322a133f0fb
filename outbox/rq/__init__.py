"""RQ, both ways: enqueue jobs with what your transaction commits, and let each have its effects once."""

from outbox.rq.leasing import leased
from outbox.rq.options import JobOptions
from outbox.rq.producing import enqueue
from outbox.rq.transacting import transactional

__all__ = ["JobOptions", "enqueue", "leased", "transactional"]
