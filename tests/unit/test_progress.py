"""Progress, on a clock that the test turns."""

import threading
from contextlib import suppress

import pytest

from outbox.progress import Hang, Progress
from outbox.vitals import Vitals


class Clock:
    def __init__(self):
        self.now = 1000.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def progress(clock):
    return Progress(seconds=clock)


def test_it_is_alive_until_the_limit_after_the_last_note(progress, clock):
    clock.now += 10
    assert progress.alive(10)
    clock.now += 0.001
    assert not progress.alive(10)
    progress.note()
    assert progress.alive(10)
    assert progress.age_s == 0


def test_what_hangs_is_named_with_its_time(progress, clock):
    progress.note("publishing")
    clock.now += 12.34

    assert progress.hung(10) == Hang("publishing", pytest.approx(12.34), 10)
    assert str(progress.hung(10)) == "no progress for 12.3 s while publishing (limit 10 s)"


def test_a_note_without_a_step_keeps_the_step(progress):
    progress.note("publishing")
    progress.note()

    assert progress.doing == "publishing"


def test_a_rest_on_purpose_is_no_hang_and_one_that_does_not_end_is(progress, clock):
    progress.note("waiting", rest_s=60)
    clock.now += 60
    assert progress.age_s == 0
    clock.now += 10
    assert progress.alive(10)
    clock.now += 0.001
    assert not progress.alive(10)


def test_after_a_rest_that_was_cut_short_age_counts_from_the_next_note(progress, clock):
    progress.note("waiting", rest_s=60)
    clock.now += 1
    progress.note("claiming")
    clock.now += 11

    assert progress.hung(10).doing == "claiming"


def test_a_task_hangs_by_its_own_limit_while_the_loop_gets_on(progress, clock):
    with progress.task("handling A", limit_s=30) as task:
        for _ in range(31):
            clock.now += 1
            progress.note()
        assert progress.hung(10) == Hang("handling A", 31, 30)
        task.note()
        assert progress.alive(10)
        clock.now += 31
        progress.note()
        assert not progress.alive(10)
    assert progress.alive(10)


def test_the_progress_of_a_task_hides_no_loop_that_hangs(progress, clock):
    for _ in range(3):
        with progress.task("handling", limit_s=30) as task:
            clock.now += 4
            task.note()

    assert progress.hung(10) == Hang("starting", 12, 10)


def test_of_several_hangs_the_one_longest_over_its_limit_is_told(progress, clock):
    with progress.task("long", limit_s=100), progress.task("short", limit_s=5):
        clock.now += 101
        assert progress.hung(50).doing == "short"


def test_a_task_that_fails_is_over(progress, clock):
    with suppress(ZeroDivisionError), progress.task("dividing", limit_s=1):
        raise ZeroDivisionError
    clock.now += 2
    progress.note()

    assert progress.alive(1)


def test_tasks_come_and_go_in_many_threads_while_somebody_asks(progress):
    def work():
        for _ in range(2000):
            with progress.task("working", limit_s=60):
                progress.note()

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        assert progress.alive(60)
    for thread in threads:
        thread.join()
    assert progress._tasks == set()


def test_vitals_know_troubles_until_they_are_over(progress):
    vitals = Vitals(limit_s=10, progress=progress)
    vitals.trouble("broker", "blocked")
    vitals.trouble("other", None)
    assert vitals.troubles == {"broker": "blocked"}
    vitals.trouble("broker", None)
    assert vitals.troubles == {}
