"""The queue that a benchmark publishes to, as a plain client of the broker sees it."""

import json
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Self

import amqp

from tests.faults.processes import Program

EXCHANGE, NAME = "outbox", "bench"
TIMEOUT_S = 900


class Queue:
    """A durable quorum queue."""

    def __init__(self, channel: amqp.Channel) -> None:
        self._channel = channel

    def declare(self) -> Self:
        """Make it, with the exchange of the relay's own default and everything bound to it."""
        self._channel.exchange_declare(EXCHANGE, "topic", durable=True, auto_delete=False)
        self._channel.queue_declare(NAME, durable=True, auto_delete=False, arguments={"x-queue-type": "quorum"})
        self._channel.queue_bind(NAME, EXCHANGE, "bench.#")
        return self

    @property
    def depth(self) -> int:
        """How many messages are in it."""
        return int(self._channel.queue_declare(NAME, passive=True).message_count)

    def wait_until(self, depth: int, *programs: Program) -> None:
        """Wait until so many messages have arrived while these programs run."""
        deadline = time.monotonic() + TIMEOUT_S
        while self.depth < depth:
            for program in programs:
                if program.process.poll() is not None or time.monotonic() > deadline:
                    raise RuntimeError(f"{program.name} does not go on:\n{program.log[-4000:]}")
            time.sleep(0.02)

    def take_all(self) -> Counter[int]:
        """Receive everything; return how often each number came."""
        taken: Counter[int] = Counter()

        def note(message: Any) -> None:
            body = message.body
            taken[json.loads(body)["number"]] += 1
            message.channel.basic_ack(message.delivery_tag)

        self._channel.basic_qos(0, 500, False)
        tag = self._channel.basic_consume(NAME, callback=note)
        while True:
            try:
                self._channel.connection.drain_events(timeout=0.5)
            except TimeoutError:
                break
        self._channel.basic_cancel(tag)
        return taken

    def check(self, count: int) -> None:
        """Receive everything, and raise unless it is each of the numbers below `count` once: else a run has no speed."""
        taken = self.take_all()
        lost = count - len(taken)
        doubled = sum(taken.values()) - len(taken)
        if lost or doubled:
            raise RuntimeError(f"of {count} messages {lost} were lost and {doubled} doubled")


@contextmanager
def queue(port: int) -> Iterator[Queue]:
    """The queue, declared and empty."""
    with amqp.Connection(f"127.0.0.1:{port}") as connection:
        yield Queue(connection.channel()).declare()
