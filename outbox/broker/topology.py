"""Declares exchanges, queues and bindings: what is missing is made, what exists is used as it is."""

from __future__ import annotations

from typing import Any

from amqp.exceptions import NotFound, PreconditionFailed

# RabbitMQ 4 drops a message of a quorum queue after 20 returns unless the queue sets another limit. The documented
# -1 for "no limit" makes RabbitMQ 3 drop it at the first return; a huge number means the same to both.
QUORUM_QUEUE = {"x-queue-type": "quorum", "x-delivery-limit": 2_000_000_000}


def declare_exchange(channel: Any, exchange: str, exchange_type: str = "topic") -> None:
    """Make a durable exchange. One that exists with another type closes the channel (406)."""
    channel.exchange_declare(exchange=exchange, type=exchange_type, durable=True, auto_delete=False)


ONE_AT_A_TIME = {**QUORUM_QUEUE, "x-single-active-consumer": True}


def declare_queue(connection: Any, channel: Any, queue: str, *, amqp: bool, ordered: bool = False) -> None:
    """Make a durable queue, on RabbitMQ a quorum queue. One that exists is left alone, whatever its type and arguments.

    One that is to be `ordered` serves one consumer at a time, while others stand by. Raises `PreconditionFailed` when it exists
    and does not.
    """
    if not amqp:
        channel.queue_declare(queue=queue, durable=True, auto_delete=False)
        return
    arguments = ONE_AT_A_TIME if ordered else QUORUM_QUEUE
    if not _exists(connection, queue):
        channel.queue_declare(queue=queue, durable=True, auto_delete=False, arguments=arguments)
    elif ordered:
        _check_one_at_a_time(connection, queue)


def bind(channel: Any, queue: str, exchange: str, pattern: str) -> None:
    """Bind a queue to an exchange. Each by itself: kombu's own declarations remember one binding per queue."""
    channel.queue_bind(queue=queue, exchange=exchange, routing_key=pattern)


def _check_one_at_a_time(connection: Any, queue: str) -> None:
    """Raise if the broker says that the queue differs in this. It names one difference only, so others may hide it."""
    channel = connection.channel()  # of its own, because any difference closes it
    try:
        channel.queue_declare(queue=queue, durable=True, auto_delete=False, arguments=ONE_AT_A_TIME)
    except PreconditionFailed as error:
        if "x-single-active-consumer" in str(error):
            raise
    finally:
        channel.close()


def _exists(connection: Any, queue: str) -> bool:
    channel = connection.channel()  # of its own, because a queue that is missing closes it
    try:
        channel.queue_declare(queue=queue, passive=True)
    except NotFound:
        return False
    finally:
        channel.close()
    return True
