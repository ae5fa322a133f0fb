"""faststream-outbox as a relay to RabbitMQ, as its documentation shows it; run by the peers' own interpreter.

`python -I faststream_peer.py MODE DATABASE_URL BROKER_URL`, where MODE is `prepare` (makes the table), `default` (all its
settings as they are) or `tuned`: many workers, fetches and deletes in batches and a table that is vacuumed often, which is what
its pages on performance and on subscribers advise for much work. Messages are persistent, confirmed and mandatory in both.
"""

import asyncio
import logging
import sys
from typing import Any

from faststream import FastStream
from faststream.rabbit import QueueType, RabbitBroker, RabbitQueue
from faststream_outbox import OutboxBroker, make_outbox_table
from faststream_outbox.autovacuum import outbox_autovacuum_ddl
from sqlalchemy import MetaData, text
from sqlalchemy.ext.asyncio import AsyncEngine, create_async_engine

TABLE = "peer_outbox"
WORKERS = 32
TUNED = {
    "max_workers": WORKERS,
    "fetch_batch_size": 1000,
    "terminal_flush_batch_size": 100,
    "min_fetch_interval": 0.05,
    "max_fetch_interval": 1.0,
}
metadata = MetaData()
table = make_outbox_table(metadata, table_name=TABLE)


async def prepare(engine: AsyncEngine) -> None:
    """Make the table, and have it vacuumed as the documentation recommends; that serves both modes."""
    async with engine.begin() as connection:
        await connection.run_sync(metadata.create_all)
        await connection.execute(text(outbox_autovacuum_ddl(TABLE)))
    await engine.dispose()


async def relay(engine: AsyncEngine, broker_url: str, options: dict[str, Any]) -> None:
    """Relay until asked to stop."""
    log_level = logging.WARNING if options else logging.INFO  # a line per message is what it does by default
    rabbit = RabbitBroker(broker_url, log_level=log_level)
    broker = OutboxBroker(engine, outbox_table=table, log_level=log_level)
    queue = RabbitQueue("bench", durable=True, queue_type=QueueType.QUORUM)
    publisher = rabbit.publisher(queue, persist=True, mandatory=True)

    @publisher
    @broker.subscriber("bench", **options)
    async def forward(body: dict[str, Any]) -> dict[str, Any]:
        return body

    async def leave() -> None:
        await rabbit.stop()

    app = FastStream(broker, on_startup=[rabbit.connect], after_startup=[_ready], after_shutdown=[leave])
    await app.run()


async def _ready() -> None:
    print("ready", flush=True)


def main() -> None:
    mode, database_url, broker_url = sys.argv[1:]
    engine = create_async_engine(database_url, pool_size=WORKERS + 4)
    if mode == "prepare":
        asyncio.run(prepare(engine))
    else:
        asyncio.run(relay(engine, broker_url, TUNED if mode == "tuned" else {}))


if __name__ == "__main__":
    main()
