"""Declares what the routes need: their exchanges, and the queues that they name, with their bindings."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from outbox.broker.topology import bind, declare_exchange, declare_queue

if TYPE_CHECKING:
    from outbox.routes import Routes


def declare(connection: Any, channel: Any, routes: Routes, *, amqp: bool) -> None:
    """Declare on a connection of py-amqp or of kombu's virtual transports."""
    for route in routes.all:
        if not route.declare:
            continue
        if route.exchange:
            declare_exchange(channel, route.exchange, route.exchange_type)
        for queue in route.queues:
            declare_queue(connection, channel, queue, amqp=amqp)
            if route.exchange:
                bind(channel, queue, route.exchange, route.topics)
