"""The README of examples/celery, typed into three terminals, on both brokers."""

import pytest
import sqlalchemy as sa

from tests.readme import blocks, with_urls
from tests.story import ROOT
from tests.terminal import Terminal, assert_shows, eventually

README = (ROOT / "examples/celery/README.md").read_text(encoding="utf-8")
SETTINGS, SHOP, RELAY, WORKER, REPORT, REPORT_PRINTS = blocks(README)


@pytest.mark.parametrize("broker", ["vhost_url", pytest.param("redis_url", marks=pytest.mark.matrix)])
def test_every_committed_parcel_is_packed_paid_for_and_sent_once(request, tmp_path, database_url, broker):
    broker_url = request.getfixturevalue(broker)
    terminal = Terminal(ROOT, {})

    def typed(commands):
        lines = [with_urls(line, database_url, "") for line in SETTINGS.commands if "BROKER" not in line]
        return [*lines, f"export OUTBOX_BROKER_URL={broker_url}", *commands]

    printed = terminal.run(typed(SHOP.commands))
    assert printed.count("ordered") == 5
    with (
        terminal.start(typed(RELAY.commands), tmp_path / "relay.log") as relay,
        terminal.start(typed(WORKER.commands), tmp_path / "worker.log") as worker,
    ):
        eventually(lambda: assert_shows(terminal.run(typed(REPORT.commands)), REPORT_PRINTS.text))
        worker.stop()
        relay.stop()
    engine = sa.create_engine(database_url, poolclass=sa.NullPool)
    with engine.connect() as connection:
        assert connection.execute(sa.text("SELECT count(*) FROM outbox_message")).scalar_one() == 0
        each = connection.execute(sa.text("SELECT count(*) FROM steps GROUP BY parcel_id, what")).scalars().all()
    assert each == [1] * 15
