"""Rows for the tests: `outgoing` makes one in memory, `insert` puts some into a database."""

from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from uuid import UUID, uuid4

import sqlalchemy as sa

from outbox.identity import partition_of
from outbox.migrations import LATEST
from outbox.migrations.sql import apply
from outbox.outgoing import Outgoing
from outbox.states import State
from outbox.store.engine import open_engine
from outbox.tables import DEFAULT

message, partition = DEFAULT.message, DEFAULT.partition


def outgoing(number: int = 1, key: str | None = None, **values: Any) -> Outgoing:
    """A claimed message; what is not given is as usual."""
    usual: dict[str, Any] = {
        "id": number,
        "message_id": uuid4(),
        "topic": "orders.placed",
        "key": key,
        "partition": partition_of(key),
        "type": "orders.placed",
        "content_type": "application/json",
        "payload": f'{{"n": {number}}}'.encode(),
        "headers": {},
        "created_at": datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC),
        "age_s": 1.0,
        "attempts": 0,
        "held_id": None,
    }
    return Outgoing(**usual | values)


def database(url: str) -> sa.Engine:
    """An engine as the relay opens it, on a database with the tables."""
    engine = open_engine(url, pool_size=20)
    with engine.begin() as connection:
        apply(connection, range(1, LATEST + 1))
    return engine


def sqlite_database(folder: Path) -> sa.Engine:
    return database(f"sqlite:///{folder / 'outbox.db'}")


def insert(target: sa.Engine | sa.Connection, *keys: str | None, **values: Any) -> list[UUID]:
    """Insert one message for each key, in this order; return their message ids."""
    if isinstance(target, sa.Engine):
        with target.begin() as connection:
            return insert(connection, *keys, **values)
    usual = {"topic": "orders.placed", "type": "orders.placed", "content_type": "application/json", "payload": b"{}"}
    rows = [{"message_id": uuid4(), "key": key, "partition": partition_of(key)} | usual | values for key in keys]
    for row in rows:  # one by one, so that ids follow the order given
        target.execute(message.insert().values(row))
    return [row["message_id"] for row in rows]


def update(engine: sa.Engine, message_id: UUID, **values: Any) -> None:
    with engine.begin() as connection:
        connection.execute(message.update().where(message.c.message_id == message_id).values(**values))


def row_of(engine: sa.Engine, message_id: UUID) -> sa.RowMapping:
    with engine.begin() as connection:
        return connection.execute(sa.select(message).where(message.c.message_id == message_id)).mappings().one()


def states(engine: sa.Engine) -> list[str]:
    """The states of all messages, in id order."""
    with engine.begin() as connection:
        return list(connection.execute(sa.select(message.c.state).order_by(message.c.id)).scalars())


def state_of(engine: sa.Engine, message_id: UUID) -> State:
    return State(row_of(engine, message_id)["state"])
