"""The same promises as in `tests/unit/test_state_machine.py`, on PostgreSQL; few games here, as many as are asked for there."""

import os

import pytest

from tests.rows import database
from tests.state_machine import play

EXAMPLES = int(os.environ.get("OUTBOX_TEST_EXAMPLES", "10"))


@pytest.fixture
def engine(database_url):
    engine = database(database_url)
    yield engine
    engine.dispose()


def test_the_outbox_keeps_its_promises_whatever_happens(engine, monkeypatch):
    play(engine, monkeypatch, examples=EXAMPLES)
