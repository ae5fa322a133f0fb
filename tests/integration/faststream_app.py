"""`python -m tests.integration.faststream_app`: a FastStream application that the tests stop and kill."""

import asyncio
import os
import sys

import sqlalchemy as sa
from faststream import FastStream
from faststream.middlewares import AckPolicy
from faststream.rabbit import RabbitBroker, RabbitQueue
from sqlalchemy.ext.asyncio import async_sessionmaker, create_async_engine

from outbox.faststream import InboxMessage, InboxMiddleware, InboxSession
from tests.integration.consuming import effects


async def main() -> None:
    engine = create_async_engine(os.environ["OUTBOX_DATABASE_URL"], poolclass=sa.NullPool)
    inbox = InboxMiddleware("shipping", sessions=async_sessionmaker(engine))
    broker = RabbitBroker(os.environ["OUTBOX_BROKER_URL"], middlewares=[inbox], ack_policy=AckPolicy.NACK_ON_ERROR)

    @broker.subscriber(RabbitQueue("shipping", declare=False))
    async def ship(session: InboxSession, message: InboxMessage) -> None:
        await session.execute(effects.insert().values(message_id=message.message_id))

    app = FastStream(broker, on_startup=[lambda: inbox.check(broker)], after_startup=[lambda: print("consuming", flush=True)])
    await app.run()


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
