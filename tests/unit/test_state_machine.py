"""No order of events loses a message, lets one overtake another of its key, or leaves one for which nobody cares: on SQLite.

`OUTBOX_TEST_EXAMPLES` sets how many games are played.
"""

import os

import pytest

from tests.rows import database
from tests.state_machine import play

EXAMPLES = int(os.environ.get("OUTBOX_TEST_EXAMPLES", "150"))


@pytest.fixture
def engine():
    engine = database("sqlite://")  # in memory, for the one thread of this test
    yield engine
    engine.dispose()


@pytest.mark.timeout(60 + EXAMPLES)
def test_the_outbox_keeps_its_promises_whatever_happens(engine, monkeypatch):
    play(engine, monkeypatch, examples=EXAMPLES)
