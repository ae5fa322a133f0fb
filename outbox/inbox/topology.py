"""Declares what a consumer needs: its exchange, its queue, and a binding for every topic pattern."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from outbox.broker.dial import is_amqp
from outbox.broker.topology import bind, declare_exchange, declare_queue

if TYPE_CHECKING:
    import kombu

    from outbox.inbox.inbox import Inbox


def declare(connection: kombu.Connection, channel: Any, inbox: Inbox) -> None:
    """Declare what is missing. Bindings of a pattern that has no handler any more stay until somebody removes them."""
    declare_exchange(channel, inbox.exchange)
    declare_queue(connection, channel, inbox.queue, amqp=is_amqp(connection), ordered=inbox.ordered)
    for pattern in inbox.patterns:
        bind(channel, inbox.queue, inbox.exchange, pattern)
