"""A consumer is alive while its loop and its handlers get on, whatever the state of the process and the servers."""

import threading
from collections.abc import Iterator

import pytest
import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncSession, async_sessionmaker, create_async_engine
from sqlalchemy.orm import Session

from outbox import Inbox, Message
from outbox.inbox import Lease, RetryPolicy
from outbox.inbox import flow as flow_module
from outbox.vitals import Vitals
from tests.integration.consuming import WAIT_S, Shop, effects, record, running, until
from tests.servers.postgres import Postgres


@pytest.fixture
def shop(database_url: str, vhost_url: str) -> Iterator[Shop]:
    shop = Shop(database_url, vhost_url)
    yield shop
    shop.close()


def test_a_handler_that_hangs_past_its_limit_is_a_hang_until_it_ends(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flow_module, "_MARGIN_S", 0.1)
    release, vitals = threading.Event(), Vitals(limit_s=30)

    @shop.inbox.transactional("orders.*", time_limit_s=0.2, retry=RetryPolicy(max_attempts=1))
    def handle(session: Session, message: Message) -> None:
        release.wait(WAIT_S)

    shop.declare()
    shop.publish("a")
    with running(shop.inbox, shop.broker_url, vitals=vitals) as runner:
        until(lambda: runner.counts["dead"] == 1)
        until(lambda: vitals.hung() is not None)
        assert "handling orders.placed a" in str(vitals.hung())
        release.set()
        until(lambda: vitals.hung() is None)


def test_progress_of_a_leased_handler_restarts_its_limits(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flow_module, "_MARGIN_S", 0.1)
    vitals = Vitals(limit_s=30)

    @shop.inbox.leased("orders.*", time_limit_s=0.6, lease_s=5.0)
    def handle(lease: Lease, message: Message) -> str:
        for _ in range(8):
            threading.Event().wait(0.2)
            lease.progress()
            assert vitals.hung() is None
        return "paid"

    shop.declare()
    shop.publish("a")
    with running(shop.inbox, shop.broker_url, vitals=vitals) as runner:
        until(lambda: runner.counts.total() == 1)
    assert runner.counts == {"handled": 1}


@pytest.mark.parametrize("kind", ["plain", "async"])
def test_an_outage_of_the_database_is_no_hang_but_not_ready(own_postgres: Postgres, vhost_url: str, kind: str) -> None:
    shop, vitals = Shop(own_postgres.create_database(), vhost_url), Vitals(limit_s=30)
    inbox = shop.inbox
    if kind == "async":
        inbox = Inbox("shipping", sessions=async_sessionmaker(create_async_engine(shop.engine.url)))

        @inbox.transactional("orders.*")
        async def handle(session: AsyncSession, message: Message) -> None:
            await session.execute(effects.insert().values(message_id=message.message_id))
    else:
        inbox.transactional("orders.*")(record)
    shop.declare(inbox)
    with running(inbox, shop.broker_url, vitals=vitals) as runner:
        until(vitals.started.is_set)
        runner.check()
        own_postgres.stop()
        shop.publish("a")
        with pytest.raises(sa.exc.DBAPIError):
            runner.check()
        assert vitals.hung() is None
        own_postgres.start()
        until(lambda: runner.counts["handled"] == 1)
        runner.check()
    shop.close()
