"""Relays as an operator runs them, and the time that they take for a backlog."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

from tests.faults.processes import Program
from tests.perf.parts.queue import Queue


def new_relay(name: str, database_url: str, broker_url: str, *options: str) -> Program:
    """A relay, not started, with its own defaults where no option says otherwise."""
    where = {"OUTBOX_DATABASE_URL": database_url, "OUTBOX_BROKER_URL": broker_url}
    return Program(name, ("-m", "outbox", "run", *options), where, ready="relay started")


@contextmanager
def relay(database_url: str, broker_url: str, *options: str) -> Iterator[Program]:
    """A relay at work; it must end in good order."""
    with new_relay("relay", database_url, broker_url, *options) as running:
        running.wait_until_ready()
        yield running
        stop(running)


def stop(running: Program) -> None:
    """Stop a program, and raise unless it ends as asked."""
    if running.terminate() != 0:
        raise RuntimeError(f"{running.name} failed:\n{running.log[-4000:]}")


def require_alive(running: Program) -> None:
    """Raise if the process has ended."""
    if running.process.poll() is not None:
        raise RuntimeError(f"{running.name} has ended:\n{running.log}")


def seconds_until(queue: Queue, count: int, *programs: Program) -> float:
    """Return how long it takes from now until so many messages have arrived."""
    began = time.perf_counter()
    queue.wait_until(count, *programs)
    return time.perf_counter() - began
