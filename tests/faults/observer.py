"""What a plain client sees: a queue of its own beside the consumer's, read with py-amqp and none of our code."""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from urllib.parse import unquote, urlsplit
from uuid import uuid4

import amqp

QUEUE = "observer"


class Observer:
    """Receives a copy of every message that is routed through the exchange from now on, or of those that `topics` selects."""

    def __init__(self, broker_url: str, *, exchange: str = "outbox", topics: str = "#") -> None:
        self._where = urlsplit(broker_url)
        self._exchange = exchange
        with self._channel() as channel:
            channel.exchange_declare(exchange, "topic", durable=True, auto_delete=False)
            channel.queue_declare(QUEUE, durable=True, auto_delete=False, arguments={"x-queue-type": "quorum"})
        self.bind(topics)

    def bind(self, topics: str) -> None:
        """Receive more topics from now on, in the same queue: nobody else may listen to them."""
        with self._channel() as channel:
            channel.queue_bind(QUEUE, self._exchange, topics)

    def leave(self) -> None:
        """Receive nothing more, so that nothing is routed to it."""
        with self._channel() as channel:
            channel.queue_delete(QUEUE)

    def received(self) -> list[amqp.Message]:
        """Return, in order, the messages that have arrived and were not returned before."""
        messages = []
        with self._channel() as channel:
            while (message := channel.basic_get(QUEUE, no_ack=True)) is not None:
                messages.append(message)
        return messages

    def all_received(self) -> list[amqp.Message]:
        """Do what `received` does, fast, for when nothing arrives any more: everything before a mark that is put last."""
        messages: list[amqp.Message] = []
        mark = str(uuid4())
        with self._channel() as channel:
            channel.basic_publish(amqp.Message("", message_id=mark), exchange="", routing_key=QUEUE)
            channel.basic_consume(QUEUE, no_ack=True, callback=messages.append)
            while not messages or messages[-1].properties["message_id"] != mark:
                channel.connection.drain_events(timeout=60)
        return messages[:-1]

    @contextmanager
    def _channel(self) -> Iterator[amqp.Channel]:
        with amqp.Connection(
            host=f"{self._where.hostname}:{self._where.port}",
            userid=unquote(self._where.username or "guest"),
            password=unquote(self._where.password or "guest"),
            virtual_host=unquote(self._where.path.removeprefix("/")) or "/",
        ) as connection:
            yield connection.channel()

    def published_extra(self) -> int:
        """Return how many messages arrived more often than once, each counted as often as it was too many."""
        seen = Counter(message.properties["message_id"] for message in self.received())
        return sum(seen.values()) - len(seen)
