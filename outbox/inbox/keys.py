"""Order within a consumer: of the messages of one key, only one is worked on at a time."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from outbox.inbox.jobs import Job


class Keys:
    """Holds back jobs whose key is being worked on. Used by one thread."""

    def __init__(self) -> None:
        self._waiting: dict[str, deque[Job]] = {}

    def admit(self, job: Job) -> bool:
        """Tell whether a job may begin; it is held back otherwise."""
        if job.key is None:
            return True
        if job.key in self._waiting:
            self._waiting[job.key].append(job)
            return False
        self._waiting[job.key] = deque()
        return True

    def done(self, job: Job) -> Job | None:
        """Note that a job has come to its end; return the next one of its key, which may begin now."""
        if job.key is None:
            return None
        waiting = self._waiting[job.key]
        if not waiting:
            del self._waiting[job.key]
            return None
        return waiting.popleft()

    def drop(self) -> list[Job]:
        """Forget the jobs that are held back, and return them."""
        dropped = [job for jobs in self._waiting.values() for job in jobs]
        for jobs in self._waiting.values():
            jobs.clear()
        return dropped
