"""One delivery is acknowledged, and one connection is open, at a time: whatever was before, is not taken along or left behind."""

import signal
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from outbox.errors import BrokerRefused, BrokerUnavailable
from outbox.publishers.rabbitmq import RabbitMQPublisher
from outbox.routes import Route, Routes
from outbox.states import Outcome
from tests.faults.proxy import Proxy
from tests.integration.consuming import WAIT_S, Shop, record, running, until
from tests.integration.test_consumer_process import closed_gate, consume
from tests.integration.test_rabbitmq_publisher import Steer, declare
from tests.rows import outgoing

TO_QUEUES = Routes((Route("#", exchange="", declare=False),))
GATED = """
import os
import sqlalchemy as sa
from sqlalchemy.orm import sessionmaker
from outbox import Inbox

inbox = Inbox("shipping", sessions=sessionmaker(sa.create_engine(os.environ["SHOP_DATABASE"])), lock_timeout_s=None)

@inbox.transactional("orders.*")
def ship(session, message):
    session.execute(sa.text("INSERT INTO effects VALUES (:id)"), {"id": message.message_id})
    if message.message_id == "first":
        session.execute(sa.text("SELECT pg_advisory_xact_lock(7)"))
"""


@pytest.fixture
def shop(database_url: str, vhost_url: str) -> Iterator[Shop]:
    shop = Shop(database_url, vhost_url)
    shop.inbox.transactional("orders.*")(record)
    shop.declare()
    yield shop
    shop.close()


def test_an_acknowledgement_covers_no_earlier_message_that_is_still_being_handled(
    shop: Shop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second is done and acknowledged while the first hangs; then the consumer is killed."""
    monkeypatch.setattr("tests.integration.test_consumer_process.APP", GATED)
    shop.publish("first", "second", "third")
    with closed_gate(shop), consume(shop, tmp_path, "--workers", "2") as process:
        until(lambda: shop.effects() == ["second", "third"])
        until(lambda: shop.lock_waits() == 1)
        process.send_signal(signal.SIGKILL)
        assert process.wait(WAIT_S) == -signal.SIGKILL
        until(lambda: shop.queued() >= 1)

    with running(shop.inbox, shop.broker_url) as runner:
        until(lambda: runner.counts["handled"] == 1)
    assert shop.effects() == ["first", "second", "third"]


def open_files() -> int:
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


def test_thirty_lost_connections_leave_none_open(vhost_url: str) -> None:
    declare(vhost_url, "q")
    with Proxy(vhost_url) as proxy, closing(RabbitMQPublisher(proxy.url, TO_QUEUES)) as publisher:
        open_by_us = []
        for _ in range(30):
            publisher.connect()
            _publish(publisher)
            open_by_us.append(open_files() - 2 * proxy.connections)  # the proxy keeps both ends of each to the last
            proxy.cut()
            until(lambda: _is_lost(publisher))

        assert proxy.connections == 30
        assert set(open_by_us[1:]) == {open_by_us[1]}


def _is_lost(publisher: RabbitMQPublisher) -> bool:
    try:
        publisher.tick()
    except BrokerUnavailable:
        return True
    return False


def _publish(publisher: RabbitMQPublisher) -> None:
    row = outgoing(topic="q")
    published = publisher.publish([row], Steer())
    assert published.verdicts[row.id].outcome is Outcome.CONFIRMED


def test_thirty_refused_connections_leave_none_open(vhost_url: str) -> None:
    """The broker lets us in, and says no to what we declare."""
    declare(vhost_url, exchange="shop")
    publisher = RabbitMQPublisher(vhost_url, Routes((Route("#", exchange="shop", exchange_type="fanout"),)))
    before = open_files()
    for _ in range(30):
        with pytest.raises(BrokerRefused):
            publisher.connect()

    assert open_files() <= before
