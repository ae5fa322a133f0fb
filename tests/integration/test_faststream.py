"""FastStream on a real RabbitMQ: each message has its effects once, and is acknowledged only after the COMMIT."""

import asyncio
import logging
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import kombu
import pytest
import sqlalchemy as sa
from faststream import AckPolicy
from faststream.exceptions import AckMessage, NackMessage, RejectMessage
from faststream.rabbit import RabbitBroker, RabbitMessage, RabbitQueue
from sqlalchemy.ext.asyncio import AsyncSession, async_sessionmaker, create_async_engine
from sqlalchemy.orm import sessionmaker

import outbox
from outbox.broker.topology import declare_queue
from outbox.errors import ConfigurationError
from outbox.faststream import InboxMessage, InboxMiddleware, InboxSession
from outbox.points import Point
from outbox.publishers.rabbitmq import RabbitMQPublisher
from outbox.routes import Route, Routes
from outbox.wire import Format
from tests.faults.processes import Program
from tests.faults.stopped import stopping_at, wait_until_stopped
from tests.integration.consuming import WAIT_S, effects, until
from tests.integration.test_kombu_publisher import Steer
from tests.recorded import context_of, links_of, parent_of, recording
from tests.rows import outgoing

TO_SHIPPING = Routes((Route("#", exchange="", routing_key="shipping"),))
SHIPPING = RabbitQueue("shipping", declare=False)  # the relay has made it, as a quorum queue


class Shop:
    """One application: its database with the table `effects`, its virtual host, and a queue `shipping`."""

    def __init__(self, database_url: str, broker_url: str) -> None:
        self.database_url, self.broker_url = database_url, broker_url
        self.engine = sa.create_engine(database_url, poolclass=sa.NullPool)
        self.sessions: Any = async_sessionmaker(create_async_engine(database_url, poolclass=sa.NullPool))
        self.calls: Counter[str] = Counter()
        outbox.metadata.create_all(self.engine)
        effects.metadata.create_all(self.engine)
        with kombu.Connection(broker_url) as connection, connection.channel() as channel:
            declare_queue(connection, channel, "shipping", amqp=True)

    def inbox(self, **options: Any) -> InboxMiddleware:
        return InboxMiddleware("shipping", sessions=self.sessions, **{"pause_s": 0.01, "lock_timeout_s": 0.2} | options)

    def broker(self, inbox: InboxMiddleware | None = None, ack_policy: Any = AckPolicy.NACK_ON_ERROR) -> RabbitBroker:
        return RabbitBroker(self.broker_url, middlewares=[inbox or self.inbox()], ack_policy=ack_policy, log_level=logging.DEBUG)

    def declare(self, queue: str, **arguments: Any) -> None:
        with kombu.Connection(self.broker_url) as connection, connection.channel() as channel:
            channel.queue_declare(queue, durable=True, auto_delete=False, arguments=arguments)

    def publish(self, *message_ids: str | None, headers: dict[str, str] | None = None, queue: str = "shipping") -> None:
        with kombu.Connection(self.broker_url) as connection, connection.channel() as channel:
            for message_id in message_ids:
                kombu.Producer(channel).publish({"n": 1}, routing_key=queue, message_id=message_id, headers=headers or {})

    def left(self, queue: str = "shipping") -> int:
        """How many messages a queue has; those that a closed connection had not acknowledged are among them."""
        with kombu.Connection(self.broker_url) as connection, connection.channel() as channel:
            return channel.queue_declare(queue, passive=True).message_count

    def effects(self) -> list[str]:
        with self.engine.connect() as connection:
            return sorted(connection.execute(sa.select(effects)).scalars())

    async def record(self, session: AsyncSession, message: outbox.Message) -> int:
        """Have the effect, and return how often the handler was called for this message."""
        self.calls[message.message_id] += 1
        await session.execute(effects.insert().values(message_id=message.message_id))
        return self.calls[message.message_id]


@pytest.fixture
def shop(database_url: str, vhost_url: str) -> Iterator[Shop]:
    shop = Shop(database_url, vhost_url)
    yield shop
    shop.engine.dispose()


async def become(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(WAIT_S):
        while not condition():  # noqa: ASYNC110 - what becomes true does so in a database or a broker
            await asyncio.sleep(0.02)


@asynccontextmanager
async def started(broker: RabbitBroker) -> AsyncIterator[None]:
    async with broker:
        await broker.start()
        yield


def run(broker: RabbitBroker, *conditions: Callable[[], bool]) -> None:
    """Run a broker until everything has come true."""

    async def main() -> None:
        async with started(broker):
            for condition in conditions:
                await become(condition)

    asyncio.run(main())


def shipping(shop: Shop, inbox: InboxMiddleware | None = None, **options: Any) -> RabbitBroker:
    """Return a broker with the usual handler."""
    broker = shop.broker(inbox)

    @broker.subscriber(SHIPPING, **options)
    async def ship(session: InboxSession, message: InboxMessage) -> None:
        await shop.record(session, message)

    return broker


def test_what_the_relay_publishes_arrives_with_its_topic_key_and_id(shop: Shop) -> None:
    broker, got = shop.broker(), []

    @broker.subscriber(SHIPPING)
    async def ship(order: dict[str, int], session: InboxSession, message: InboxMessage) -> None:
        await shop.record(session, message)
        got.append((order, message))

    row = outgoing(1, "c-7", topic="orders.placed", type="Placed", headers={"mine": 1})
    publisher = RabbitMQPublisher(shop.broker_url, TO_SHIPPING)
    publisher.connect()
    publisher.publish([row], Steer())
    publisher.publish([row], Steer())
    publisher.close()
    run(broker, lambda: len(got) == 1, lambda: shop.left() == 0)
    ((order, message),) = got
    assert order == {"n": 1}
    assert (message.message_id, message.topic, message.key) == (str(row.message_id), "orders.placed", "c-7")
    assert (message.type, message.content_type, message.payload) == ("Placed", "application/json", b'{"n": 1}')
    assert message.headers == {"mine": 1, "outbox-topic": "orders.placed", "outbox-key": "c-7"}
    assert shop.effects() == [str(row.message_id)]
    assert shop.left() == 0


def test_duplicates_are_acknowledged_without_the_handler_and_without_a_reply(shop: Shop) -> None:
    shop.declare("shipped")
    broker = shop.broker()

    @broker.subscriber(SHIPPING)
    @broker.publisher("shipped")
    async def ship(session: InboxSession, message: InboxMessage) -> str:
        await shop.record(session, message)
        return message.message_id

    shop.publish("a", "a", "b", "a")
    run(broker, lambda: shop.left("shipped") == 2, lambda: shop.left() == 0)
    assert (shop.calls, shop.effects()) == ({"a": 1, "b": 1}, ["a", "b"])
    assert (shop.left(), shop.left("shipped")) == (0, 2)


@pytest.mark.parametrize("ack_policy", [AckPolicy.NACK_ON_ERROR, AckPolicy.REJECT_ON_ERROR, AckPolicy.ACK])
def test_a_message_whose_handler_fails_is_rolled_back_and_comes_again_whatever_the_policy(
    shop: Shop, ack_policy: AckPolicy, caplog: pytest.LogCaptureFixture
) -> None:
    broker = shop.broker(ack_policy=ack_policy)

    @broker.subscriber(SHIPPING)
    async def ship(session: InboxSession, message: InboxMessage) -> None:
        if await shop.record(session, message) < 3:
            raise ValueError("not yet")

    shop.publish("a")
    run(broker, lambda: shop.effects() == ["a"])
    assert shop.calls["a"] == 3
    assert (shop.effects(), shop.left()) == (["a"], 0)
    warned = [record for record in caplog.records if record.name == "outbox.faststream" and record.levelno == logging.WARNING]
    assert len(warned) == (0 if ack_policy is AckPolicy.NACK_ON_ERROR else 1)


@pytest.mark.parametrize("declared", [True, False])
def test_a_rejected_message_goes_to_the_dead_letter_exchange_where_there_is_one(shop: Shop, *, declared: bool) -> None:
    shop.declare("dead")
    arguments = {"x-dead-letter-exchange": "", "x-dead-letter-routing-key": "dead"}
    shop.declare("orders", **arguments)
    broker = shop.broker(shop.inbox(dead_lettered=not declared), ack_policy=AckPolicy.REJECT_ON_ERROR)
    queue = RabbitQueue("orders", arguments=arguments if declared else None, declare=declared)

    @broker.subscriber(queue)
    async def ship(session: InboxSession, message: InboxMessage) -> None:
        await shop.record(session, message)
        raise ValueError("never")

    shop.publish("a", queue="orders")
    run(broker, lambda: shop.left("dead") == 1)
    assert (shop.calls["a"], shop.effects(), shop.left("orders")) == (1, [], 0)


@pytest.mark.parametrize(
    ("said", "calls", "effects"), [(AckMessage, 1, ["a", "b"]), (RejectMessage, 1, []), (NackMessage, 2, ["a", "b"])]
)
def test_a_handler_may_say_itself_what_becomes_of_its_message(shop: Shop, said: Any, calls: int, effects: list[str]) -> None:
    broker = shop.broker()

    @broker.subscriber(SHIPPING)
    async def ship(session: InboxSession, message: InboxMessage) -> None:
        if await shop.record(session, message) == 1:
            raise said

    shop.publish("a", "b")
    run(broker, lambda: len(shop.calls) == 2, lambda: set(shop.calls.values()) == {calls})
    assert (shop.effects(), shop.left()) == (effects, 0)


def test_two_deliveries_at_the_same_time_have_one_effect(shop: Shop) -> None:
    broker, entered, gate = shop.broker(), asyncio.Event(), asyncio.Event()

    @broker.subscriber(SHIPPING)
    async def ship(session: InboxSession, message: InboxMessage) -> None:
        await shop.record(session, message)
        entered.set()
        await gate.wait()

    async def main() -> None:
        shop.publish("a", "a")
        async with started(broker):
            await entered.wait()
            await become(lambda: waiting(shop) == 1)
            gate.set()
            await become(lambda: shop.effects() == ["a"])

    asyncio.run(main())
    run(shipping(shop), lambda: shop.left() == 0)
    assert (shop.calls["a"], shop.effects(), shop.left()) == (1, ["a"], 0)


def waiting(shop: Shop) -> int:
    query = "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND wait_event = 'transactionid'"
    with shop.engine.connect() as connection:
        return connection.execute(sa.text(query)).scalar_one()


def test_a_cloud_event_is_known_by_its_source_and_id(shop: Shop) -> None:
    shop.publish(None, None, headers={"ce-source": "/shop", "ce-id": "1"})
    shop.publish(None, headers={"ce-source": "/shop", "ce-id": "2"})
    run(shipping(shop), lambda: len(shop.effects()) == 2, lambda: shop.left() == 0)
    assert (shop.effects(), shop.left()) == (["/shop 1", "/shop 2"], 0)


def test_a_message_without_an_id_is_kept_and_not_handled(shop: Shop, caplog: pytest.LogCaptureFixture) -> None:
    shop.publish(None)
    run(shipping(shop), lambda: "the message has no id" in caplog.text)
    assert (shop.calls, shop.left()) == ({}, 1)


def test_a_policy_that_acknowledges_before_the_commit_is_refused_at_the_start(shop: Shop) -> None:
    for policy in (AckPolicy.ACK_FIRST, AckPolicy.MANUAL):
        inbox = shop.inbox()
        broker = shipping(shop, inbox, ack_policy=policy)
        with pytest.raises(ConfigurationError, match=f"Ship.*ack_policy={policy.name}.*NACK_ON_ERROR"):
            inbox.check(broker)
    inbox = shop.inbox()
    inbox.check(shipping(shop, inbox))


def test_with_manual_acknowledgement_nothing_is_handled_and_nothing_lost(shop: Shop, caplog: pytest.LogCaptureFixture) -> None:
    shop.publish("a")
    run(shipping(shop, ack_policy=AckPolicy.MANUAL), lambda: "ack_policy=MANUAL, which loses" in caplog.text)
    assert (shop.calls, shop.left()) == ({}, 1)


def test_what_is_read_without_a_handler_is_passed_on(shop: Shop) -> None:
    broker = shop.broker()
    subscriber = broker.subscriber(SHIPPING)
    shop.publish("a", "a")

    async def main() -> list[Any]:
        async with started(broker):
            return [await subscriber.get_one(no_ack=False), await subscriber.get_one(no_ack=False)]

    got = asyncio.run(main())
    assert [message.message_id for message in got] == ["a", "a"]


def test_a_handler_that_acknowledges_itself_is_told_so(shop: Shop, caplog: pytest.LogCaptureFixture) -> None:
    broker = shop.broker()

    @broker.subscriber(SHIPPING)
    async def ship(session: InboxSession, message: InboxMessage, received: RabbitMessage) -> None:
        await received.ack()
        await shop.record(session, message)

    shop.publish("a")
    run(broker, lambda: shop.effects() == ["a"])
    assert "handler acknowledged before the COMMIT" in caplog.text


def test_sessions_that_are_not_async_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="async_sessionmaker"):
        InboxMiddleware("shipping", sessions=sessionmaker())  # type: ignore[arg-type]


@pytest.mark.parametrize("point", [Point.BEFORE_COMMIT, Point.BEFORE_ACK])
def test_a_process_killed_around_its_commit_leaves_one_effect(shop: Shop, point: Point) -> None:
    environment = {"OUTBOX_DATABASE_URL": shop.database_url, "OUTBOX_BROKER_URL": shop.broker_url}

    def app() -> Program:
        return Program("app", ["-m", "tests.integration.faststream_app"], environment, ready="consuming")

    shop.publish("a")
    with stopping_at(point, 1, app()) as stopped:
        wait_until_stopped(stopped)
        assert shop.effects() == ([] if point is Point.BEFORE_COMMIT else ["a"])
        stopped.kill()
    until(lambda: shop.left() == 1)
    with app() as again:
        until(lambda: shop.effects() == ["a"] and shop.left() == 0, again.log)
        assert again.wait_until_ready().terminate() == 0, again.log
    assert (shop.effects(), shop.left()) == (["a"], 0)


@pytest.mark.parametrize("continues", [False, True])
def test_a_handler_runs_in_a_span_that_is_linked_to_its_message(shop: Shop, *, continues: bool) -> None:
    broker = shop.broker(shop.inbox(continue_traces=continues))
    failing = iter([True, False])

    @broker.subscriber(SHIPPING)
    async def ship(session: InboxSession, message: InboxMessage) -> None:
        await shop.record(session, message)
        if next(failing):
            raise LookupError
        with spans.tracer.start_as_current_span("inside"):
            await asyncio.sleep(0)

    with recording() as spans:
        shop.publish("a", "a", headers={"traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"})
        run(broker, lambda: len(spans.all()) == 4)
    found = [dict(span.attributes or {}) for span in spans.named("process shipping")]
    said = [(attributes.get("outbox.result"), attributes.get("error.type")) for attributes in found]
    assert sorted(said, key=str) == [("duplicate", None), ("handled", None), (None, "LookupError")]
    created = (0x0AF7651916CD43DD8448EB211C80319C, 0xB7AD6B7169203331)
    assert [links_of(span) for span in spans.named("process shipping")] == [[created]] * 3
    assert {parent_of(span) for span in spans.named("process shipping")} == {created if continues else None}
    assert parent_of(spans.one("inside")) in [context_of(span) for span in spans.named("process shipping")]


def test_a_structured_cloud_event_is_the_message_that_it_holds(shop: Shop) -> None:
    broker, received = shop.broker(), list[Any]()

    @broker.subscriber(SHIPPING)
    async def ship(session: InboxSession, message: InboxMessage) -> None:
        await shop.record(session, message)
        received.append((message.message_id, message.payload, message.content_type, message.type, message.key))

    row = outgoing(key="o-1", type="Placed")
    publisher = RabbitMQPublisher(shop.broker_url, replace(TO_SHIPPING, format=Format.STRUCTURED, source="/shop"))
    publisher.connect()
    publisher.publish([row], Steer())
    publisher.close()
    run(broker, lambda: bool(received))
    assert received == [(str(row.message_id), row.payload, "application/json", "Placed", "o-1")]
