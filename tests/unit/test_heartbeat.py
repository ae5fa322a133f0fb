"""The heartbeat: when a lease is renewed, when it is left to run out, and what one failure means."""

import asyncio
import queue
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, cast

import pytest
from sqlalchemy.util import await_only, greenlet_spawn

from outbox import clock
from outbox.inbox import LeaseLost
from outbox.inbox.heartbeat import Beat, beating
from outbox.inbox.hold import Hold
from outbox.inbox.lease_record import Acquired

WAIT_S = 20
LEASE_S, TIME_LIMIT_S = 60.0, 100.0


@dataclass
class Record:
    """A record whose database says what the test wants."""

    held: bool = True
    completed: bool = False
    renewals: int = 0
    lease_s: float = LEASE_S
    consumer: str = "payments"
    message_id: str = "m-1"
    tokens: list[int] = field(default_factory=list)

    def renew(self, token: int) -> bool:
        self.renewals += self.held
        return self.held

    def is_completed(self, token: int) -> bool:
        return self.completed


class Now:
    seconds = 1000.0


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> Now:
    now = Now()
    monkeypatch.setattr(clock, "seconds", lambda: now.seconds)
    return now


@pytest.fixture
def record() -> Record:
    return Record()


@pytest.fixture
def hold(now: Now, record: Record) -> Hold:
    return Hold(cast("Any", record), Acquired(7), leased_at=now.seconds, time_limit_s=TIME_LIMIT_S)


def test_a_renewal_lasts_a_lease_from_its_own_start(now: Now, hold: Hold) -> None:
    now.seconds += 50
    assert hold.renew()
    now.seconds += 59.9
    hold.progress()
    now.seconds += 0.1
    with pytest.raises(LeaseLost, match="own clock"):
        hold.progress()


def test_without_progress_it_is_not_renewed_any_more(
    now: Now, hold: Hold, record: Record, caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(10):
        now.seconds += 20
        assert hold.renew()
    assert record.renewals == TIME_LIMIT_S / 20
    assert caplog.text.count("no progress within the time limit") == 1
    with pytest.raises(LeaseLost):
        hold.progress()


def test_with_progress_it_is_renewed_for_ever(now: Now, hold: Hold, record: Record) -> None:
    for _ in range(50):
        now.seconds += 20
        assert hold.renew()
        hold.progress()
    assert record.renewals == 50


def test_progress_that_comes_late_but_within_the_lease_revives_it(now: Now, hold: Hold, record: Record) -> None:
    now.seconds += 90
    assert hold.renew()
    now.seconds += 20
    assert hold.renew()
    assert record.renewals == 1
    hold.progress()
    assert hold.renew()
    assert record.renewals == 2


def test_the_word_of_the_database_ends_it_at_once(hold: Hold, record: Record) -> None:
    record.held = False
    assert not hold.renew()
    for call in (hold.progress, hold.complete):
        with pytest.raises(LeaseLost, match="taken over"):
            call()


def test_what_was_completed_by_a_commit_that_nobody_heard_of_is_not_lost(hold: Hold, record: Record) -> None:
    record.held, record.completed = False, True
    assert not hold.renew()
    hold.progress()


def test_a_failure_is_logged_and_tried_again_sooner(caplog: pytest.LogCaptureFixture) -> None:
    outcomes = iter([ConnectionError("away\nfor a moment"), True, False])

    def renew() -> bool:
        outcome = next(outcomes)
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    beat = Beat(renew, every_s=20, extra={"message_id": "m-1"})
    assert [beat(), beat(), beat()] == [5, 20, None]
    (said,) = caplog.records
    assert (said.message, vars(said)["error"]) == ("lease not renewed, trying again", "ConnectionError: away")


@contextmanager
def beats(*, is_async: bool, outcomes: list[bool | Exception]) -> Iterator["queue.SimpleQueue[str]"]:
    """Run the heartbeat; the queue gets the name of the thread of each call."""
    calls: queue.SimpleQueue[str] = queue.SimpleQueue()
    left = iter(outcomes)

    def renew() -> bool:
        calls.put(threading.current_thread().name)
        outcome = next(left, True)
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    with beating(renew, every_s=0.004, is_async=is_async, extra={}):
        yield calls


def test_a_thread_beats_beside_the_handler_and_ends_with_it() -> None:
    with beats(is_async=False, outcomes=[True, OSError("away")]) as calls:
        assert {calls.get(timeout=WAIT_S) for _ in range(4)} == {"outbox-lease"}
    assert "outbox-lease" not in {thread.name for thread in threading.enumerate()}


def test_it_stops_beating_when_there_is_nothing_left_to_renew() -> None:
    with beats(is_async=False, outcomes=[True, False]) as calls:
        calls.get(timeout=WAIT_S)
        calls.get(timeout=WAIT_S)
        for thread in threading.enumerate():
            if thread.name == "outbox-lease":
                thread.join(WAIT_S)
        assert calls.empty()


def test_a_task_beats_beside_the_handler_and_ends_with_it() -> None:
    def block() -> None:
        with beats(is_async=True, outcomes=[True, OSError("away")]) as calls:
            names = {await_only(asyncio.to_thread(calls.get, timeout=WAIT_S)) for _ in range(4)}
        assert names == {threading.current_thread().name}

    async def run() -> None:
        await greenlet_spawn(block)
        assert asyncio.all_tasks() == {asyncio.current_task()}

    asyncio.run(run())
