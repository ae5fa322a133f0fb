"""Operators who pause the same pattern at the same moment: one of them has paused it, and neither fails."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from click.testing import CliRunner

from outbox.cli import main
from outbox.relay.resuming import Resume
from outbox.store import pauses
from outbox.tables import DEFAULT
from tests.integration.test_dead import wait_until_blocked

PATTERN = "orders.*"


def pause(engine):
    with engine.begin() as connection:
        return pauses.add(connection, DEFAULT, PATTERN)


@pytest.mark.parametrize("resuming", [False, True])
def test_the_second_of_two_who_pause_at_once_waits_and_finds_it_paused(engine, resuming):
    if resuming:
        pause(engine)
        Resume(engine, DEFAULT, PATTERN).begin()
    with ThreadPoolExecutor(1) as pool:
        with engine.begin() as first:
            assert pauses.add(first, DEFAULT, PATTERN) is True
            second = pool.submit(pause, engine)
            wait_until_blocked(engine)
        assert second.result(30) is False

    with engine.begin() as connection:
        assert [(each.topics, each.resuming) for each in pauses.listed(connection, DEFAULT)] == [(PATTERN, False)]


def test_the_second_pauses_if_the_first_was_rolled_back(engine):
    with ThreadPoolExecutor(1) as pool:
        with engine.connect() as first:
            assert pauses.add(first, DEFAULT, PATTERN) is True
            second = pool.submit(pause, engine)
            wait_until_blocked(engine)
            first.rollback()
        assert second.result(30) is True


def test_the_command_that_comes_second_ends_in_order(engine, database_url):
    said = []

    def command():
        done = CliRunner().invoke(main, ["pause", PATTERN, "--database-url", database_url])
        said.append((done.exit_code, done.output))

    with engine.begin() as first:
        assert pauses.add(first, DEFAULT, PATTERN)
        thread = threading.Thread(target=command)
        thread.start()
        wait_until_blocked(engine)
    thread.join(30)

    assert said == [(0, f"{PATTERN}: was paused already\n")]


def test_a_pause_that_is_there_keeps_its_time(engine):
    assert pause(engine)
    with engine.begin() as connection:
        before = connection.execute(DEFAULT.pause.select()).all()
    assert not pause(engine)
    with engine.begin() as connection:
        assert connection.execute(DEFAULT.pause.select()).all() == before
