"""One look at a consumer, through its own sessions."""

from __future__ import annotations

from typing import TYPE_CHECKING

from outbox.store.failed_stats import consumer_stats

if TYPE_CHECKING:
    from outbox.inbox.inbox import Inbox
    from outbox.store.failed_stats import ConsumerStats


def look(inbox: Inbox) -> ConsumerStats:
    """Return how a consumer stands. For an inbox of `async def` handlers to be called through `processing`."""
    with inbox.transaction() as (_session, connection):
        return consumer_stats(connection, inbox.tables, inbox.consumer)
