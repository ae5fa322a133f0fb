"""The README of examples/orders, typed into three terminals."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

from tests.readme import Block, blocks, with_urls
from tests.story import ROOT
from tests.terminal import Program, Terminal, assert_shows, eventually

README = (ROOT / "examples/orders/README.md").read_text(encoding="utf-8")
SETTINGS, SHOP, SHOP_PRINTS, RELAY, CONSUMER, REPORT, REPORT_PRINTS = blocks(README)
READY = {RELAY: "relay started", CONSUMER: "consuming"}


class Reader:
    """Someone who types blocks of the README, with the URLs of our servers in its `export` lines."""

    def __init__(self, folder: Path, *, database_url: str, broker_url: str) -> None:
        self._folder = folder
        self._urls = (database_url, broker_url)
        self._engine = sa.create_engine(database_url, poolclass=sa.NullPool)
        self._terminal = Terminal(ROOT, {})

    def runs(self, *commands: str) -> str:
        return self._terminal.run(self._typed(commands))

    def starts(self, block: Block) -> Program:
        program = self._terminal.start(self._typed(block.commands), self._folder / f"{block.line}.log")
        program.wait_for(READY[block])
        return program

    def sees(self, query: str) -> list[Any]:
        with self._engine.connect() as connection:
            return list(connection.execute(sa.text(query)).scalars())

    def _typed(self, commands: Iterable[str]) -> list[str]:
        return [with_urls(command, *self._urls) for command in (*SETTINGS.commands, *commands)]


@pytest.fixture
def reader(tmp_path: Path, database_url: str, vhost_url: str) -> Reader:
    return Reader(tmp_path, database_url=database_url, broker_url=vhost_url)


@pytest.mark.parametrize("order", [(RELAY, CONSUMER), (CONSUMER, RELAY)], ids=["relay first", "consumer first"])
def test_every_committed_order_is_shipped_once(reader: Reader, order: tuple[Block, Block]) -> None:
    printed = reader.runs(*SHOP.commands)
    assert_shows(printed, SHOP_PRINTS.text)
    assert printed.count("refused") == 1
    with reader.starts(order[0]) as first, reader.starts(order[1]) as second:
        eventually(lambda: assert_shipped(reader, 10, by=(first, second)))
        eventually(lambda: assert_shows(reader.runs(*REPORT.commands), REPORT_PRINTS.text))
        second.stop()
        first.stop()
    assert_shipped(reader, 10)


def assert_shipped(reader: Reader, count: int, *, by: Sequence[Program] = ()) -> None:
    for program in by:
        program.check_running()
    shipped = sorted(reader.sees("SELECT order_id FROM shipments"))
    assert len(shipped) == count
    assert shipped == sorted(reader.sees("SELECT order_id FROM payments"))
    assert shipped == sorted(reader.sees("SELECT id FROM orders"))


def test_a_refused_order_leaves_nothing(reader: Reader) -> None:
    reader.runs(*SHOP.commands)
    orders = sorted(reader.sees("SELECT id::text FROM orders"))
    assert len(orders) == 10
    assert orders == sorted(reader.sees("SELECT key FROM outbox_message"))
    assert reader.sees("SELECT in_stock FROM items") == [99_990]


def test_the_revisions_make_what_the_models_say(reader: Reader) -> None:
    reader.runs("alembic upgrade head")
    assert "No new upgrade operations detected" in reader.runs("alembic check")
