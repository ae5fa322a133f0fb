"""Relays as an operator runs them, and the time that they take for a backlog."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

from tests.faults.processes import Program
from tests.perf.parts.queue import Queue


@contextmanager
def relay(database_url: str, broker_url: str, *options: str) -> Iterator[Program]:
    """A relay at work, with its own defaults where no option says otherwise; it must end in good order."""
    where = {"OUTBOX_DATABASE_URL": database_url, "OUTBOX_BROKER_URL": broker_url}
    with Program("relay", ("-m", "outbox", "run", *options), where, ready="relay started") as program:
        program.wait_until_ready()
        yield program
        stop(program)


def stop(program: Program) -> None:
    """Stop a program, and raise unless it ends as asked."""
    if program.terminate() != 0:
        raise RuntimeError(f"{program.name} failed:\n{program.log[-4000:]}")


def seconds_until(queue: Queue, count: int, *programs: Program) -> float:
    """Return how long it takes from now until so many messages have arrived."""
    began = time.perf_counter()
    queue.wait_until(count, *programs)
    return time.perf_counter() - began
