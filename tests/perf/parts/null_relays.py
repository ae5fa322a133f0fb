"""Relays that publish nowhere: what is left is the claim and the settle. Each is a process, as in life."""

import multiprocessing as mp
import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.synchronize import Event
from typing import Any, Self

from outbox.policies import Policies
from outbox.publishers.flight import CONFIRMED
from outbox.relay.batch import Delivered
from outbox.relay.transactions import Transactions
from outbox.store.engine import open_engine
from outbox.tables import DEFAULT

Noted = list[tuple[int, list[int]]]
"""When, by the machine's clock, a relay would have published which ids."""

_LONGEST_S = 900
_POLL_INTERVAL_S = 0.5


class NullRelays:
    """Some relays at work on one database, from `begin` until so many messages are settled."""

    def __init__(self, url: str, number: int, *, batch_size: int) -> None:
        context = mp.get_context("spawn")
        self._settled: Any = context.Value("q", 0)
        self._begin, self._end = context.Event(), context.Event()
        self._notes: Any = context.Queue()
        self._ready = context.Semaphore(0)
        arguments = (url, batch_size, self._settled, self._ready, self._begin, self._end, self._notes)
        self._processes = [context.Process(target=_work, args=(f"relay-{each}", *arguments)) for each in range(number)]

    def wait_until_ready(self) -> None:
        """Wait until all are connected."""
        for _ in self._processes:
            if not self._ready.acquire(timeout=60):
                raise RuntimeError("a relay does not start")

    def seconds_for(self, count: int) -> float:
        """Let them begin; return how long they take to settle so many messages."""
        began = time.perf_counter()
        self._begin.set()
        while self._settled.value < count:
            if time.perf_counter() - began > _LONGEST_S or not all(each.is_alive() for each in self._processes):
                raise RuntimeError(f"the relays do not go on: {self._settled.value} of {count} are settled")
            time.sleep(0.002)
        return time.perf_counter() - began

    def noted(self) -> Noted:
        """Stop them; return what they have noted, in the order of time."""
        self._end.set()
        notes = [note for _ in self._processes for note in self._notes.get(timeout=60)]
        return sorted(notes)

    def __enter__(self) -> Self:
        for process in self._processes:
            process.start()
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._processes:
            process.join(timeout=10)
            process.kill()


def _work(owner: str, url: str, batch_size: int, settled: Any, ready: Any, begin: Event, end: Event, notes: Any) -> None:
    with _transactions(owner, url, batch_size) as transactions:
        transactions.claim()  # connects
        ready.release()
        begin.wait()
        noted: Noted = []
        last: Delivered | None = None
        empty_polls = 0
        while last is not None or not end.is_set():
            turned = transactions.turn_over(last, claim=not end.is_set())
            if turned.settled is not None:
                with settled.get_lock():
                    settled.value += sum(turned.settled.states.values())
            last, batch = None, turned.batch
            if batch is None:
                empty_polls += 1
                time.sleep(min(_POLL_INTERVAL_S, 0.01 * 2**empty_polls))  # as a relay does; one that spins slows the others down
                continue
            empty_polls = 0
            noted.append((time.monotonic_ns(), [row.id for row in batch.rows]))
            last = Delivered(batch, dict.fromkeys(noted[-1][1], CONFIRMED))
    notes.put(noted)


@contextmanager
def _transactions(owner: str, url: str, batch_size: int) -> Iterator[Transactions]:
    engine = open_engine(url)
    yield Transactions(engine, DEFAULT, owner=owner, lease_s=30, batch_size=batch_size, policies=Policies())
    engine.dispose()
