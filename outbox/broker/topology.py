"""Declares exchanges, queues and bindings: what is missing is made, what exists is used as it is."""

from __future__ import annotations

from typing import Any

from amqp.exceptions import NotFound

# RabbitMQ 4 drops a message of a quorum queue after 20 returns unless the queue sets another limit. The documented
# -1 for "no limit" makes RabbitMQ 3 drop it at the first return; a huge number means the same to both.
QUORUM_QUEUE = {"x-queue-type": "quorum", "x-delivery-limit": 2_000_000_000}


def declare_exchange(channel: Any, exchange: str, exchange_type: str = "topic") -> None:
    """Make a durable exchange. One that exists with another type closes the channel (406)."""
    channel.exchange_declare(exchange=exchange, type=exchange_type, durable=True, auto_delete=False)


ONE_AT_A_TIME = {**QUORUM_QUEUE, "x-single-active-consumer": True}


def declare_queue(connection: Any, channel: Any, queue: str, *, amqp: bool, ordered: bool = False) -> None:
    """Make a durable queue, on RabbitMQ a quorum queue. One that exists is left alone, whatever its type and arguments.

    But one that is to be `ordered`, which is to say that it serves one consumer at a time while others stand by, must be just
    that: another one closes the channel (406).
    """
    if not amqp:
        channel.queue_declare(queue=queue, durable=True, auto_delete=False)
    elif ordered:
        channel.queue_declare(queue=queue, durable=True, auto_delete=False, arguments=ONE_AT_A_TIME)
    elif not _exists(connection, queue):
        channel.queue_declare(queue=queue, durable=True, auto_delete=False, arguments=QUORUM_QUEUE)


def bind(channel: Any, queue: str, exchange: str, pattern: str) -> None:
    """Bind a queue to an exchange. Each by itself: kombu's own declarations remember one binding per queue."""
    channel.queue_bind(queue=queue, exchange=exchange, routing_key=pattern)


def _exists(connection: Any, queue: str) -> bool:
    channel = connection.channel()  # of its own, because a queue that is missing closes it
    try:
        channel.queue_declare(queue=queue, passive=True)
    except NotFound:
        return False
    finally:
        channel.close()
    return True
