"""Producers: they commit transactions of one event each, at times that were set beforehand.

On a connection, without a session: what a producer does beside is not measured, and takes the processors from what is.
"""

import random
import time
from collections.abc import Callable

import sqlalchemy as sa

import outbox
from tests.perf.parts.broker import TOPIC
from tests.perf.parts.waking import wake_by

Committed = list[tuple[int, int]]


def make_writer(database_url: str, wake_address: str | None) -> Callable[[range, int, float], Committed]:
    """Return a function that commits events with these numbers, one every `every_s` on average, from a monotonic time on.

    It returns, for each number, the monotonic time in nanoseconds at which its COMMIT had returned.
    """
    engine = wake_by(sa.create_engine(database_url, pool_size=1), wake_address)

    def write(numbers: range, start_ns: int, every_s: float) -> Committed:
        committed = []
        for place, number in enumerate(numbers):
            # Jitter within each one's own time, or it could always fall on the same moment between two polls.
            due_ns = start_ns + int((place + random.random()) * every_s * 1e9)
            time.sleep(max(0, due_ns - time.monotonic_ns()) / 1e9)
            event = outbox.Event(topic=TOPIC, payload={"number": number, "text": "x" * 200}, key=f"key-{number % 1000}")
            with engine.begin() as connection:
                outbox.enqueue(connection, event)
            committed.append((number, time.monotonic_ns()))
        return committed

    return write
