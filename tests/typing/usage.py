"""What callers write, for the type checker: this file is checked, never run."""

from collections.abc import Coroutine
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any, assert_type
from uuid import UUID

import pydantic
import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine, AsyncSession, async_scoped_session, async_sessionmaker
from sqlalchemy.orm import Session, scoped_session, sessionmaker

import outbox
from outbox import Event, Inbox, Message, Tables, enqueue, enqueue_many
from outbox.inbox import AsyncLease, Lease, leased
from outbox.testing import Enqueued, Redelivered, assert_enqueued, drain, enqueued, redeliver, refute_enqueued


@outbox.event(topic="orders.placed", key="order_id")
@dataclass(frozen=True)
class OrderPlaced:
    order_id: UUID
    total: int


@outbox.event(topic="orders.paid", key=lambda paid: paid.order_id, headers=lambda paid: {"tenant": paid.tenant})
class OrderPaid(pydantic.BaseModel):
    order_id: int
    tenant: str


@outbox.event(topic="orders.seen", encoder=str, content_type="application/json")
class OrderSeen:
    pass


def registered_classes_keep_their_types() -> None:
    placed = OrderPlaced(UUID(int=1), total=3)
    assert_type(placed, OrderPlaced)
    assert_type(placed.total, int)
    assert_type(OrderPaid(order_id=1, tenant="t").tenant, str)
    OrderPlaced(UUID(int=1))  # type: ignore[call-arg]


def sessions_return_at_once(
    session: Session,
    async_session: AsyncSession,
    scoped: scoped_session[Session],
    async_scoped: async_scoped_session[AsyncSession],
    connection: sa.Connection,
) -> None:
    event = Event(topic="orders.placed", payload={"n": 1}, key="1", headers={"a": "b", "c": 1, "d": True, "e": None})
    assert_type(enqueue(session, event), UUID)
    assert_type(enqueue(async_session, event), UUID)
    assert_type(enqueue(scoped, event), UUID)
    assert_type(enqueue(async_scoped, OrderPlaced(UUID(int=1), 3)), UUID)
    assert_type(enqueue_many(connection, [event, OrderSeen()]), list[UUID])


async def an_async_connection_is_awaited(connection: AsyncConnection) -> None:
    event = Event(topic="a", payload=b"x", content_type="text/plain", available_at=datetime.now(UTC))
    assert_type(enqueue(connection, event), Coroutine[Any, Any, UUID]).close()
    enqueue(connection, event)  # type: ignore[unused-coroutine]
    assert_type(await enqueue(connection, event), UUID)
    assert_type(await enqueue_many(connection, [event]), list[UUID])


def own_tables_are_passed_by_name(session: Session) -> None:
    tables = outbox.attach(sa.MetaData(), schema="messaging")
    assert_type(tables, Tables)
    enqueue(session, Event(topic="a", payload=None, delay=timedelta(minutes=5)), tables=tables)


def mistakes_are_seen(engine: sa.Engine, session: Session) -> None:
    enqueue(engine, Event(topic="a", payload=1))  # type: ignore[call-overload]
    Event("a", 1)  # type: ignore[call-arg]
    Event(topic="a", payload=1, headers={"a": 1.5})  # type: ignore[dict-item]
    Event(topic="a", payload=1, delay=5)  # type: ignore[arg-type]
    Event(topic="a", payload=1).key = "b"  # type: ignore[misc]
    outbox.enqeue(session)  # type: ignore[attr-defined]
    enqueue(session, OrderSeen(), outbox.Tables())  # type: ignore[call-overload]


def lazy_names_are_classes(inbox: Inbox, message: Message) -> None:
    assert_type(inbox, Inbox)
    assert_type(message, Message)


def a_lease_is_plain_with_plain_sessions(sessions: sessionmaker[Session], inbox: Inbox) -> None:
    with leased(sessions, "payments", "m-1", lease_s=30, time_limit_s=60) as lease, sessions.begin() as session:
        assert_type(lease, Lease)
        assert_type(lease.idempotency_key, str)
        lease.progress()
        lease.complete({"charge": 1}, session=session)

    @inbox.leased("orders.*", lease_s=30)
    def charge(lease: Lease, message: Message) -> dict[str, str]:
        return {lease.idempotency_key: message.topic}

    assert_type(charge(lease, Message(message_id="m", topic="t", payload=b"")), dict[str, str])


async def a_lease_is_awaited_with_async_sessions(sessions: async_sessionmaker[AsyncSession]) -> None:
    async with leased(sessions, "payments", "m-1") as lease, sessions.begin() as session:
        assert_type(lease, AsyncLease)
        await lease.complete(None, session=session)
        lease.complete()  # type: ignore[unused-coroutine]
    with leased(sessions, "payments", "m-1"):  # type: ignore[attr-defined]
        pass


def tests_of_plain_code_get_values(engine: sa.Engine, session: Session, inbox: Inbox, message: Message) -> None:
    assert_type(assert_enqueued(session, topic="a", key="1", payload={}, headers={}, times=2), list[Enqueued])
    assert_type(enqueued(engine), list[Enqueued])
    assert_type(drain(session, to=inbox), list[Message])
    assert_type(redeliver(inbox, message, metadata=outbox.metadata), Redelivered)


async def tests_of_async_code_await_them(connection: AsyncConnection, session: AsyncSession) -> None:
    assert_type(await assert_enqueued(session, topic="a"), list[Enqueued])
    assert_type(await drain(connection), list[Message])
    refute_enqueued(session, topic="a")  # type: ignore[unused-coroutine]
    await refute_enqueued(session, topic="a")


def whatever_makes_sessions_or_connections_can_wake_a_relay(
    engine: sa.Engine,
    async_engine: AsyncEngine,
    sessions: sessionmaker[Session],
    async_sessions: async_sessionmaker[AsyncSession],
) -> None:
    outbox.wake_relay(engine, "udp://127.0.0.1:7411")
    outbox.wake_relay(async_engine, "unix:///run/outbox/relay.sock", "postgres")
    outbox.wake_relay(sessions, "postgres", tables=Tables())
    outbox.wake_relay(async_sessions, "postgres")
    outbox.wake_relay("udp://127.0.0.1:7411")  # type: ignore[arg-type]
