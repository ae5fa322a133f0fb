"""The lease, as handlers see it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sqlalchemy.util import greenlet_spawn

from outbox.inbox.idempotency import idempotency_key
from outbox.inbox.limits import current

if TYPE_CHECKING:
    from outbox.inbox.dedup import Async, Sync
    from outbox.inbox.hold import Hold


class _Held:
    """What `Lease` and `AsyncLease` have in common."""

    def __init__(self, hold: Hold) -> None:
        self._hold = hold
        self._guard = current()

    @property
    def first(self) -> bool:
        """Whether there is something to do: False when the message is done already, and `result` is what came of it."""
        return self._hold.first

    @property
    def result(self) -> Any:
        """The result that was kept, for a message that is done already; None while it is handled."""
        return self._hold.result

    @property
    def token(self) -> int:
        """The fencing token: larger than that of every worker before; 0 when there is no lease."""
        return self._hold.token

    @property
    def consumer(self) -> str:
        """The consumer's name."""
        return self._hold.record.consumer

    @property
    def message_id(self) -> str:
        """The id of the message."""
        return self._hold.record.message_id

    @property
    def idempotency_key(self) -> str:
        """What to hand to the other system, so that a second request for the same message has no second effect there.

        The same at every delivery and in every worker: see `outbox.inbox.idempotency.idempotency_key` for its form.
        """
        return idempotency_key(self.consumer, self.message_id)

    def progress(self) -> None:
        """Say that the handler goes on: the lease is renewed for another `time_limit_s`. No I/O, callable from any thread.

        Raises `LeaseLost` when another worker has the message, as far as the last renewal has shown, or when the lease has
        run out by this worker's own clock, which runs on while the machine is suspended. Call it before every
        step that cannot be undone. Not guaranteed: that the lease lasts until that step is done.
        """
        self._hold.progress()
        if self._guard is not None:
            self._guard.progress()


class Lease(_Held):
    """A lease on one message, as `leased` and an inbox's handlers get it."""

    def complete(self, result: object = None, *, session: Sync | None = None) -> None:
        """Write down that the message is done, and its result (anything JSON, as for an event's payload).

        With `session`, in the caller's transaction, which must be committed inside the block: what else it writes is then
        there if and only if the lease was still held. Else in a transaction of its own, at once. Safe to repeat when the
        outcome of a COMMIT is not known; the first result stays.

        Raises `LeaseLost` when another worker has taken over: then roll back, and do not acknowledge. Raises `InvalidResult`
        for what is not JSON, and `NoTransaction` for a session that has none.
        """
        target = _registered(session)
        self._hold.complete(result, target=target)


class AsyncLease(_Held):
    """A lease on one message, for asyncio."""

    async def complete(self, result: object = None, *, session: Async | None = None) -> None:
        """Do what `Lease.complete` does."""
        target = _registered(session)
        if target is None:
            await greenlet_spawn(self._hold.complete, result)
        else:
            await target.run_sync(lambda sync: self._hold.complete(result, target=sync))


def _registered(session: Any) -> Any:
    """Return the session itself, also where a scoped session stands for that of this thread or task."""
    return session() if hasattr(session, "registry") else session
