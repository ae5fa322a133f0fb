"""The README of examples/payments, typed into four terminals, and the consumer killed where it says."""

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

from tests.readme import Block, blocks, with_urls
from tests.servers.proc import free_port
from tests.story import ROOT
from tests.terminal import Program, Terminal, assert_shows, eventually

README = (ROOT / "examples/payments/README.md").read_text(encoding="utf-8")
SETTINGS, WANT, PROVIDER, RELAY, CONSUMER, REPORT, REPORT_PRINTS = blocks(README)
READY = {PROVIDER: "provider ready", RELAY: "relay started", CONSUMER: "consuming"}


class Reader:
    """Someone who types blocks of the README, with the URLs of our servers in its `export` lines."""

    def __init__(self, folder: Path, *, database_url: str, broker_url: str) -> None:
        self._folder = folder
        self._urls = (database_url, broker_url)
        self._provider_url = f"http://127.0.0.1:{free_port()}"
        self._engine = sa.create_engine(database_url, poolclass=sa.NullPool)
        self._terminal = Terminal(ROOT, {})
        self._started = 0

    def runs(self, *commands: str) -> str:
        return self._terminal.run(self._typed(*commands))

    def starts(self, block: Block) -> Program:
        self._started += 1
        program = self._terminal.start(self._typed(*block.commands), self._folder / f"{self._started}.log")
        program.wait_for(READY[block])
        return program

    def sees(self, query: str) -> list[Any]:
        with self._engine.connect() as connection:
            return list(connection.execute(sa.text(query)).scalars())

    def _typed(self, *commands: str) -> list[str]:
        typed = [with_urls(command, *self._urls) for command in (*SETTINGS.commands, *commands)]
        return [command.replace("http://127.0.0.1:8099", self._provider_url) for command in typed]


@pytest.fixture
def reader(tmp_path: Path, database_url: str, vhost_url: str) -> Reader:
    return Reader(tmp_path, database_url=database_url, broker_url=vhost_url)


@pytest.fixture
def start(reader: Reader) -> Iterator[Callable[[Block], Program]]:
    with ExitStack() as running:
        yield lambda block: running.enter_context(reader.starts(block))


def test_a_consumer_that_is_killed_while_it_pays_charges_nobody_twice(reader: Reader, start: Callable[[Block], Program]) -> None:
    reader.runs(*WANT.commands)
    provider = start(PROVIDER)
    start(RELAY)
    consumer = start(CONSUMER)
    provider.wait_for("charged ch_1")
    os.kill(consumer._process.pid, signal.SIGKILL)
    assert reader.sees("SELECT state FROM processed_messages") == ["processing"]
    start(CONSUMER)
    eventually(lambda: assert_shows(reader.runs(*REPORT.commands), REPORT_PRINTS.text))
    assert provider.output.count("asked again ch_1") == 1
    assert provider.output.count("\ncharged") == 2
    assert sorted(reader.sees("SELECT charge_id FROM payments")) == ["ch_1", "ch_2"]
    assert sorted(reader.sees("SELECT result ->> 'id' FROM processed_messages")) == ["ch_1", "ch_2"]
    assert reader.sees("SELECT count(*) FROM payments JOIN processed_messages ON result ->> 'id' = charge_id") == [2]


def test_the_revisions_make_what_the_models_say(reader: Reader) -> None:
    reader.runs("alembic upgrade head")
    assert "No new upgrade operations detected" in reader.runs("alembic check")
