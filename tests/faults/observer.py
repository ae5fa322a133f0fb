"""What a plain client sees: a queue of its own beside the consumer's, read with py-amqp and none of our code."""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from urllib.parse import unquote, urlsplit

import amqp

QUEUE = "observer"


class Observer:
    """Receives a copy of every message that is routed through the exchange from now on."""

    def __init__(self, broker_url: str, *, exchange: str = "outbox") -> None:
        self._where = urlsplit(broker_url)
        with self._channel() as channel:
            channel.exchange_declare(exchange, "topic", durable=True, auto_delete=False)
            channel.queue_declare(QUEUE, durable=True, auto_delete=False, arguments={"x-queue-type": "quorum"})
            channel.queue_bind(QUEUE, exchange, "#")

    def received(self) -> list[amqp.Message]:
        """Return, in order, the messages that have arrived and were not returned before."""
        messages = []
        with self._channel() as channel:
            while (message := channel.basic_get(QUEUE, no_ack=True)) is not None:
                messages.append(message)
        return messages

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
