"""`drain`: a relay in the test, without broker and threads, that returns what it has published."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, overload

import sqlalchemy as sa

from outbox.identity import PARTITIONS
from outbox.inbox import Inbox, Message
from outbox.policies import Policies
from outbox.publishers.base import Steady
from outbox.publishers.memory import MemoryPublisher
from outbox.relay.transactions import Transactions
from outbox.store import claim, snapshots
from outbox.tables import DEFAULT, Tables
from outbox.testing.joining import is_async_target, joined, joined_async
from outbox.topics import matches
from outbox.wire import KEY_HEADER, TOPIC_HEADER

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Iterator, Sequence

    from outbox.outgoing import Outgoing
    from outbox.relay.batch import Batch
    from outbox.testing.reaching import Awaited, Plain

_LEASE_S = 300.0
_BATCH = 1000
_OWNER = "outbox.testing.drain"


@overload
def drain(target: Plain, *, to: Inbox | Sequence[Inbox] = ..., tables: Tables = ..., most: int = ...) -> list[Message]: ...
@overload
def drain(
    target: Awaited, *, to: Inbox | Sequence[Inbox] = ..., tables: Tables = ..., most: int = ...
) -> Coroutine[Any, Any, list[Message]]: ...
def drain(target: Any, *, to: Inbox | Sequence[Inbox] = (), tables: Tables = DEFAULT, most: int = 1000) -> Any:
    """Publish everything that is deliverable, with a relay's own transactions, and return it as consumers get it.

    It goes on until nothing is left, also with what the handlers enqueue, in rounds: each takes what there is, in the
    order in which it was enqueued. With `to`, each message is then handed to the inboxes that have a handler for its topic, one after the
    other, once; what a handler raises is raised here. `target` is an engine: then only what is committed is published, and the
    changes are committed. Or it is a session or connection: then everything happens within its transaction, in savepoints,
    uncommitted events included, and the inboxes' sessions join it for the time; rolled back, nothing has happened. For an async
    target the result is to be awaited.

    Not published: what is scheduled for later, what waits behind a dead or paused message. Not covered in a session or
    connection: the relay's and the handlers' COMMIT, locks between them, kills (for those see `redeliver`).
    Raises `AssertionError` after `most` messages, because handlers may enqueue each other's events for ever, and `ConfigurationError`
    for an async inbox with a plain session.
    """
    inboxes = [to] if isinstance(to, Inbox) else list(to)

    def work(engine: Any, deliver: Callable[[Inbox, Message], object]) -> list[Message]:
        return _Drain(engine, tables, inboxes, deliver, most).run()

    if is_async_target(target):
        return joined_async(target, tables, inboxes, work)
    return joined(target, tables, inboxes, work)


class _Drain:
    def __init__(
        self, engine: sa.Engine, tables: Tables, inboxes: list[Inbox], deliver: Callable[[Inbox, Message], object], most: int
    ) -> None:
        self._engine = engine
        self._tables = tables
        self._transactions = Transactions(engine, tables, owner=_OWNER, lease_s=_LEASE_S, batch_size=_BATCH, policies=Policies())
        self._inboxes = inboxes
        self._deliver = deliver
        self._most = most
        self._publisher = MemoryPublisher()
        with engine.begin() as connection:
            snapshots.fill_partitions(connection, tables)

    def run(self) -> list[Message]:
        messages: list[Message] = []
        while batches := list(self._claimed()):
            published = self._published(batches)
            messages += published
            if len(messages) > self._most:
                last = ", ".join(dict.fromkeys(message.topic for message in messages[-10:]))
                raise AssertionError(f"more than {self._most} messages, the last of them {last}: do handlers enqueue for ever?")
            self._deliver_all(published)
        self._check_nothing_left()
        return messages

    def _published(self, batches: Sequence[Batch]) -> list[Message]:
        """Publish all batches together, so that the order does not depend on the partitions, and settle them."""
        rows = sorted((row for batch in batches for row in batch.rows), key=lambda row: row.id)
        before = len(self._publisher.published)
        verdicts = self._publisher.publish(rows, Steady()).verdicts
        for batch in batches:
            self._transactions.settle(batch, {row.id: verdicts[row.id] for row in batch.rows})
        return [_as_received(row) for row in sorted(self._publisher.published[before:], key=lambda row: row.id)]

    def _deliver_all(self, messages: Sequence[Message]) -> None:
        for message in messages:
            for inbox in self._inboxes:
                if any(matches(pattern, message.topic) for pattern in inbox.patterns):
                    self._deliver(inbox, message)

    def _check_nothing_left(self) -> None:
        with self._engine.begin() as connection:
            left = claim.unsent(connection, self._tables, range(PARTITIONS), limit=1).rows
        if left:
            raise AssertionError(
                f"{left[0].topic} is pending, but another relay holds its partition: is one running, or was one killed?"
            )

    def _claimed(self) -> Iterator[Batch]:
        while (batch := self._transactions.claim()) is not None:
            yield batch


def _as_received(row: Outgoing) -> Message:
    added = {TOPIC_HEADER: row.topic} if row.key is None else {TOPIC_HEADER: row.topic, KEY_HEADER: row.key}
    return Message(
        message_id=str(row.message_id),
        topic=row.topic,
        payload=row.payload,
        key=row.key,
        type=row.type,
        content_type=row.content_type,
        headers={**(row.headers or {}), **added},
    )
