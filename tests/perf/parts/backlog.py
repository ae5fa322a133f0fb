"""Messages that wait in the outbox; each says its own number, so that a plain client can tell which have arrived."""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import sqlalchemy as sa

from outbox.identity import new_message_id, partition_of
from outbox.migrations import LATEST
from outbox.migrations.sql import apply
from tests.servers.postgres import Postgres

TOPIC = "bench.one"
PAYLOAD_BYTES = 256

Key = Callable[[int], str | None]


def a_thousand_keys(number: int) -> str | None:
    """Every message has a key, one of a thousand."""
    return f"key-{number % 1000}"


def no_keys(_number: int) -> str | None:
    """No message has a key."""
    return None


def one_key(_number: int) -> str | None:
    """All messages have the same key."""
    return "hot"


@contextmanager
def database(postgres: Postgres) -> Iterator[str]:
    """A new database with the tables; dropped afterwards. Gives its URL."""
    url = postgres.create_database()
    engine = sa.create_engine(url, poolclass=sa.NullPool)
    with engine.begin() as connection:
        apply(connection, range(1, LATEST + 1))
    yield url
    postgres.drop_database(url)


def payload(number: int, size_bytes: int = PAYLOAD_BYTES) -> bytes:
    """Return the JSON of one message, padded to a size."""
    begin = json.dumps({"number": number})[:-1] + ', "padding": "'
    return f'{begin}{"x" * (size_bytes - len(begin) - 2)}"}}'.encode()


@contextmanager
def filling(
    url: str, count: int, *, key: Key = a_thousand_keys, payload_bytes: int = PAYLOAD_BYTES, topic: str = TOPIC
) -> Iterator[None]:
    """Write `count` messages; they become visible, all at once, at the end of the block."""
    engine = sa.create_engine(url, poolclass=sa.NullPool)
    columns = "message_id, topic, key, partition, type, content_type, payload"
    with engine.begin() as connection:
        cursor = connection.connection.cursor()
        with cursor.copy(f"COPY outbox_message ({columns}) FROM STDIN") as copy:
            for number in range(count):
                own = key(number)
                body = payload(number, payload_bytes)
                copy.write_row((new_message_id(), topic, own, partition_of(own), "bench", "application/json", body))
        yield


def left(url: str) -> int:
    """Return how many messages are in the table, in whatever state."""
    engine = sa.create_engine(url, poolclass=sa.NullPool)
    with engine.connect() as connection:
        found = connection.exec_driver_sql("SELECT count(*) FROM outbox_message /* the observer asks */")
        return int(found.scalar_one())
