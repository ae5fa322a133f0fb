"""The same consumer with the inbox's record of each message and without, for `outbox-consume` and for a loop of its own."""

import json
import os
from collections.abc import Callable
from typing import Any

import amqp
import sqlalchemy as sa
from sqlalchemy.orm import Session, sessionmaker

import outbox
from outbox.inbox import once
from tests.perf.parts.broker import QUEUE

CONSUMER = "bench"
metadata = sa.MetaData()
effect = sa.Table(
    "bench_effect",
    metadata,
    sa.Column("id", sa.BigInteger, sa.Identity(), primary_key=True),
    sa.Column("number", sa.BigInteger, nullable=False),
    sa.Column("at", sa.DateTime(timezone=True), nullable=False, server_default=sa.func.clock_timestamp()),
)


def inbox(*, dedup: bool) -> outbox.Inbox:
    """Return the consumer for `outbox-consume`."""
    engine = sa.create_engine(os.environ["OUTBOX_DATABASE_URL"], pool_size=8)
    consumer = outbox.Inbox(CONSUMER, sessions=sessionmaker(engine), queue=QUEUE)
    if dedup:
        consumer.transactional("bench.#")(_handle)
    else:
        consumer.idempotent("bench.#", because="the benchmark delivers each message once")(_handle)
    return consumer


def loop(engine: sa.Engine, channel: amqp.Channel, messages: int, *, dedup: bool, at_once: int) -> None:
    """Take so many messages from the queue, `at_once` in a transaction, and acknowledge them after its COMMIT."""
    taken: list[Any] = []
    done = 0
    work: Callable[[Session, Any], None] = _once if dedup else _again
    channel.basic_qos(0, max(100, 2 * at_once), a_global=False)
    tag = channel.basic_consume(QUEUE, callback=taken.append)
    while done < messages:
        while len(taken) < min(at_once, messages - done):
            channel.connection.drain_events(timeout=60)
        batch, taken[:] = taken[:at_once], taken[at_once:]
        with Session(engine) as session, session.begin():
            for message in batch:
                work(session, message)
        channel.basic_ack(batch[-1].delivery_tag, multiple=True)
        done += len(batch)
    channel.basic_cancel(tag)


def _once(session: Session, received: amqp.Message) -> None:
    with once(session, CONSUMER, received.properties["message_id"]) as first:
        if first:
            _effect(session, received.body)


def _again(session: Session, received: amqp.Message) -> None:
    _effect(session, received.body)


def _handle(session: Session, message: outbox.Message) -> None:
    _effect(session, message.payload)


def _effect(session: Session, body: bytes | str) -> None:
    session.execute(sa.insert(effect).values(number=json.loads(body)["number"]))
