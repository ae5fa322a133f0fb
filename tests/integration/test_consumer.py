"""A consumer on real servers: each message has its effect once, whatever fails."""

import asyncio
import logging
import threading
import time
from collections.abc import Iterator

import kombu
import pytest
import sqlalchemy as sa
from sqlalchemy.exc import DBAPIError
from sqlalchemy.ext.asyncio import AsyncSession, async_sessionmaker, create_async_engine
from sqlalchemy.orm import Session

from outbox import Inbox, Message
from outbox.errors import BrokerRefused
from outbox.inbox.runner import Runner
from tests.integration.consuming import WAIT_S, Shop, effects, record, running, until
from tests.servers.postgres import Postgres
from tests.servers.rabbitmq import RabbitMQ


@pytest.fixture
def shop(database_url: str, vhost_url: str) -> Iterator[Shop]:
    shop = Shop(database_url, vhost_url)
    yield shop
    shop.close()


def logged(caplog: pytest.LogCaptureFixture, text: str) -> list[logging.LogRecord]:
    return [record for record in caplog.records if text in record.getMessage()]


def test_each_message_is_handled_and_acknowledged(shop: Shop) -> None:
    received: list[Message] = []

    @shop.inbox.transactional("orders.*")
    def handle(session: Session, message: Message) -> None:
        received.append(message)
        record(session, message)

    shop.declare()
    shop.publish("a", type="OrderPlaced", headers={"outbox-topic": "orders.placed", "outbox-key": "7"})
    with running(shop.inbox, shop.broker_url) as runner:
        until(lambda: runner.counts["handled"] == 1)
    assert shop.effects() == ["a"]
    assert shop.queued() == 0
    message = received[0]
    assert (message.message_id, message.topic, message.key, message.type) == ("a", "orders.placed", "7", "OrderPlaced")
    assert message.payload == b"{}"
    assert message.json() == {}


def test_duplicate_is_dropped_and_acknowledged(shop: Shop) -> None:
    shop.inbox.transactional("orders.*")(record)
    shop.declare()
    shop.publish("a", "b", "a")
    with running(shop.inbox, shop.broker_url) as runner:
        until(lambda: runner.counts["duplicate"] == 1 and runner.counts["handled"] == 2)
    assert shop.effects() == ["a", "b"]
    assert shop.queued() == 0


def test_two_deliveries_at_once_to_two_consumers_have_one_effect(shop: Shop) -> None:
    @shop.inbox.transactional("orders.*")
    def handle(session: Session, message: Message) -> None:
        record(session, message)
        until(lambda: shop.lock_waits() == 1, "the other delivery does not wait for this one")

    shop.declare()
    options = {"workers": 1, "prefetch": 1}
    with running(shop.inbox, shop.broker_url, **options) as one, running(shop.inbox, shop.broker_url, **options) as two:
        shop.publish("a", "a")
        until(lambda: (one.counts + two.counts) == {"handled": 1, "duplicate": 1})
    assert shop.effects() == ["a"]
    assert shop.queued() == 0


def test_failing_handler_is_tried_again_and_others_go_on(shop: Shop, caplog: pytest.LogCaptureFixture) -> None:
    tried: list[float] = []

    @shop.inbox.transactional("orders.*")
    def handle(session: Session, message: Message) -> None:
        record(session, message)
        if message.message_id == "bad":
            tried.append(time.monotonic())
            if len(tried) < 3:
                raise RuntimeError("not yet")

    shop.declare()
    shop.publish("bad", "good")
    with running(shop.inbox, shop.broker_url) as runner:
        until(lambda: shop.effects() == ["good"])
        assert len(tried) == 1
        until(lambda: runner.counts["handled"] == 2)
    assert shop.effects() == ["bad", "good"]
    assert shop.queued() == 0
    assert shop.failed() == []
    failures = logged(caplog, "handling failed")
    assert [vars(failure)["message_id"] for failure in failures] == ["bad", "bad"]
    assert all(failure.exc_info for failure in failures)


@pytest.mark.parametrize(
    ("kind", "error", "state"), [("swallow", "TransactionAborted", "retry"), ("commit", "NoTransaction", "dead")]
)
def test_handler_that_breaks_the_transaction_has_failed(
    shop: Shop, caplog: pytest.LogCaptureFixture, kind: str, error: str, state: str
) -> None:
    @shop.inbox.transactional("orders.*")
    def handle(session: Session, message: Message) -> None:
        if kind == "swallow":
            record(session, message)
            with pytest.raises(DBAPIError):
                session.execute(sa.text("SELECT 1 / 0"))
        else:
            session.commit()

    shop.declare()
    shop.publish("a")
    with running(shop.inbox, shop.broker_url) as runner:
        until(lambda: runner.counts.total() == 1)
    assert shop.effects() == []
    assert [(row.message_id, row.state, row.error_class) for row in shop.failed()] == [("a", state, error)]
    exc_info = logged(caplog, {"retry": "handling failed", "dead": "message given up"}[state])[0].exc_info
    assert exc_info is not None
    assert exc_info[0] is not None
    assert exc_info[0].__name__ == error


def test_message_locked_by_another_transaction_waits_and_has_not_failed(shop: Shop) -> None:
    inbox = shop.new_inbox(lock_timeout_s=0.05)
    inbox.transactional("orders.*")(record)
    shop.declare(inbox)
    with running(inbox, shop.broker_url) as runner:
        with Session(shop.engine) as other:
            with inbox.once(other, "a"):
                pass
            shop.publish("a")
            until(lambda: runner.counts["busy"] >= 1)
        until(lambda: runner.counts["handled"] == 1)
    assert shop.failed() == []
    assert shop.effects() == ["a"]


@pytest.mark.parametrize(
    ("message_id", "topic", "more", "state", "text"),
    [
        ("a", "orders.unknown", {}, "retry", "no handler for topic 'orders.unknown'"),
        (None, "orders.placed", {}, "dead", "property message_id"),
        ("a", "orders.placed", {"headers": {"compression": "zlib"}}, "dead", "cannot be unpacked"),
    ],
)
def test_message_that_cannot_be_handled_is_kept_and_explained(
    shop: Shop, message_id: str, topic: str, more: dict[str, object], state: str, text: str
) -> None:
    before = shop.new_inbox()
    before.transactional("orders.*")(record)
    shop.declare(before)
    shop.inbox.transactional("orders.placed")(record)
    shop.publish(message_id, topic=topic, **more)
    with running(shop.inbox, shop.broker_url) as runner:
        until(lambda: runner.counts[state] == 1)
        shop.publish("good")
        until(lambda: shop.effects() == ["good"])
    assert shop.queued() == 0
    (kept,) = shop.failed()
    assert kept.state == state
    assert text in kept.last_error
    assert kept.payload == b"{}"


def test_async_handlers_run_at_the_same_time(shop: Shop, database_url: str) -> None:
    engine = create_async_engine(database_url)
    inbox = Inbox("shipping", sessions=async_sessionmaker(engine))
    together = threading.Barrier(3)

    @inbox.transactional("orders.*")
    async def handle(session: AsyncSession, message: Message) -> None:
        await session.execute(effects.insert().values(message_id=message.message_id))
        await asyncio.to_thread(together.wait, WAIT_S)

    shop.declare(inbox)
    shop.publish("a", "b", "c", "a")
    with running(inbox, shop.broker_url, workers=3) as runner:
        until(lambda: runner.counts == {"handled": 3, "duplicate": 1})
    assert shop.effects() == ["a", "b", "c"]
    assert shop.queued() == 0


def test_many_messages_over_several_workers(shop: Shop) -> None:
    shop.inbox.transactional("orders.*")(record)
    shop.declare()
    message_ids = [f"{number:03}" for number in range(300)]
    shop.publish(*message_ids)
    with running(shop.inbox, shop.broker_url, workers=4) as runner:
        until(lambda: runner.counts["handled"] == len(message_ids))
    assert shop.effects() == message_ids
    assert shop.queued() == 0


def test_handler_that_outlives_the_grace_is_left_behind(shop: Shop) -> None:
    started, release = threading.Event(), threading.Event()

    @shop.inbox.transactional("orders.*")
    def handle(session: Session, message: Message) -> None:
        started.set()
        release.wait(WAIT_S)

    shop.declare()
    shop.publish("a")
    with running(shop.inbox, shop.broker_url, grace_s=0.1):
        assert started.wait(WAIT_S)
    until(lambda: shop.queued() == 1)
    release.set()
    until(lambda: not any(thread.name.startswith("outbox-consume") for thread in threading.enumerate()))


def test_existing_queue_of_another_type_is_used_as_it_is(shop: Shop) -> None:
    shop.inbox.transactional("orders.*")(record)
    with kombu.Connection(shop.broker_url) as connection, connection.channel() as channel:
        channel.queue_declare("shipping", durable=True, auto_delete=False, arguments={"x-max-length": 1000})
    with running(shop.inbox, shop.broker_url) as runner:
        until(lambda: shop.queued() == 0)
        shop.declare()
        shop.publish("a")
        until(lambda: runner.counts["handled"] == 1)
    assert shop.effects() == ["a"]


def test_consumer_goes_on_after_its_queue_was_deleted(shop: Shop, caplog: pytest.LogCaptureFixture) -> None:
    shop.inbox.transactional("orders.*")(record)
    shop.declare()
    with running(shop.inbox, shop.broker_url) as runner:
        shop.publish("a")
        until(lambda: runner.counts["handled"] == 1)
        with kombu.Connection(shop.broker_url) as connection, connection.channel() as channel:
            channel.queue_delete("shipping")
        until(lambda: logged(caplog, "server away"))
        shop.declare()
        shop.publish("b")
        until(lambda: runner.counts["handled"] == 2)


@pytest.mark.parametrize("change", ["password", "vhost", "exchange"])
def test_broker_that_refuses_at_the_start_is_an_error(shop: Shop, change: str) -> None:
    shop.inbox.transactional("orders.*")(record)
    url = shop.broker_url
    if change == "password":
        url = url.replace(":guest@", ":wrong@")
    elif change == "vhost":
        url += "-missing"
    else:
        with kombu.Connection(url) as connection, connection.channel() as channel:
            channel.exchange_declare("outbox", type="fanout", durable=True, auto_delete=False)
    with pytest.raises(BrokerRefused):
        Runner(shop.inbox, url).run(threading.Event())


def test_broker_that_is_away_at_the_start_is_waited_for(database_url: str, own_rabbitmq: RabbitMQ) -> None:
    shop = Shop(database_url, own_rabbitmq.create_vhost())
    shop.inbox.transactional("orders.*")(record)
    shop.declare()
    shop.publish("a")
    own_rabbitmq.stop()
    with running(shop.inbox, shop.broker_url) as runner:
        own_rabbitmq.start()
        until(lambda: runner.counts["handled"] == 1)
    shop.close()


def test_consumer_goes_on_after_a_broker_restart(
    database_url: str, own_rabbitmq: RabbitMQ, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "outbox")
    shop = Shop(database_url, own_rabbitmq.create_vhost())
    started, release = threading.Event(), threading.Event()

    @shop.inbox.transactional("orders.*")
    def handle(session: Session, message: Message) -> None:
        record(session, message)
        started.set()
        assert release.wait(WAIT_S)

    shop.declare()
    shop.publish("a", "b")
    with running(shop.inbox, shop.broker_url) as runner:
        assert started.wait(WAIT_S)
        own_rabbitmq.restart()
        release.set()  # "a" commits, and can no longer be acknowledged
        until(lambda: runner.counts["duplicate"] == 1 and "b" in shop.effects())
        shop.publish("c")
        until(lambda: shop.effects() == ["a", "b", "c"])
        until(lambda: logged(caplog, "server back"))
    assert shop.queued() == 0
    assert len(logged(caplog, "server away")) == 1
    assert len(logged(caplog, "server back")) == 1
    shop.close()


def test_consumer_goes_on_after_a_database_restart(
    own_postgres: Postgres, vhost_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "outbox")
    shop = Shop(own_postgres.create_database(), vhost_url)
    shop.inbox.transactional("orders.*")(record)
    shop.declare()
    with running(shop.inbox, shop.broker_url, workers=2) as runner:
        shop.publish("a")
        until(lambda: runner.counts["handled"] == 1)
        own_postgres.stop()
        shop.publish("b", "c")
        until(lambda: logged(caplog, "server away"))
        own_postgres.start()
        until(lambda: runner.counts["handled"] == 3)
    assert shop.effects() == ["a", "b", "c"]
    assert shop.queued() == 0
    assert len(logged(caplog, "server away")) == 1
    assert len(logged(caplog, "server back")) == 1
    shop.close()
