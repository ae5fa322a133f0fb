"""The same promises as in `tests/unit/test_state_machine.py`, on PostgreSQL; few games here, as many as are asked for there."""

import os

from tests.state_machine import play

EXAMPLES = int(os.environ.get("OUTBOX_TEST_EXAMPLES", "10"))


def test_the_outbox_keeps_its_promises_whatever_happens(engine, monkeypatch):
    play(engine, monkeypatch, examples=EXAMPLES)
