"""Uses of `outbox.rq` and `outbox.faststream` that type checkers must accept, and ones that they must refuse."""

from typing import assert_type
from uuid import UUID

from faststream.middlewares import AckPolicy
from faststream.rabbit import RabbitBroker
from sqlalchemy.ext.asyncio import async_sessionmaker
from sqlalchemy.orm import Session, sessionmaker

import outbox.rq
from outbox.faststream import InboxMessage, InboxMiddleware, InboxSession
from outbox.inbox import Lease

sessions = sessionmaker()


@outbox.rq.transactional("mail", sessions=sessions)
def note_sent(session: Session, order_id: int) -> str:
    return str(order_id)


@outbox.rq.leased("payments", sessions=sessions, lease_s=30)
def charge(lease: Lease, order_id: int) -> str:
    return lease.idempotency_key


def enqueue(session: Session) -> None:
    assert_type(outbox.rq.enqueue(session, "mail", note_sent, 7), UUID)
    outbox.rq.enqueue(session, "mail", "shop.mail.send", 7, options=outbox.rq.JobOptions(retries=5))
    assert_type(note_sent(7), str | None)
    assert_type(charge(7), str | None)
    note_sent(session, 7)  # type: ignore[arg-type, call-arg]


inbox = InboxMiddleware("shipping", sessions=async_sessionmaker())
broker = RabbitBroker("amqp://localhost", middlewares=[inbox], ack_policy=AckPolicy.NACK_ON_ERROR)


@broker.subscriber("shipping")
async def ship(order: dict[str, str], session: InboxSession, message: InboxMessage) -> None:
    assert_type(message.key, str | None)
    await session.flush()
