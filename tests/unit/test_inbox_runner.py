"""The runner on kombu's virtual transports, without any server; and what it refuses."""

import logging
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import kombu
import pytest
import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncSession, async_sessionmaker, create_async_engine
from sqlalchemy.orm import Session, sessionmaker

import outbox
from outbox import Inbox, Message
from outbox.errors import ConfigurationError, OutboxError
from outbox.inbox.runner import Runner
from outbox.inbox.topology import declare
from outbox.store.engine import open_engine

# kombu's SQLAlchemy transport uses what SQLAlchemy 2.1 deprecates, and does what 2.0.0 warned of on SQLite
pytestmark = pytest.mark.filterwarnings(
    "ignore:The ``noload`` loader:sqlalchemy.exc.SADeprecationWarning",
    "ignore:Dialect sqlite:sqlalchemy.exc.SAWarning",
)

effects = sa.Table("effects", sa.MetaData(), sa.Column("message_id", sa.Text))
WAIT_S = 30


def record(session: Session, message: Message) -> None:
    session.execute(effects.insert().values(message_id=message.message_id))


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[sa.Engine]:
    engine = open_engine(f"sqlite:///{tmp_path}/app.db")
    outbox.metadata.create_all(engine)
    effects.metadata.create_all(engine)
    yield engine
    engine.dispose()


@pytest.fixture
def inbox(engine: sa.Engine) -> Inbox:
    return Inbox("shipping", sessions=sessionmaker(engine))


@pytest.mark.parametrize("url", ["memory://", "sqla+sqlite:///{}/mq.db"])
def test_virtual_transports(inbox: Inbox, engine: sa.Engine, tmp_path: Path, url: str) -> None:
    url = url.format(tmp_path)
    stop, failed = threading.Event(), list[Message]()

    @inbox.transactional("orders.*")
    def handle(session: Session, message: Message) -> None:
        record(session, message)
        if message.message_id == "b" and not failed:
            failed.append(message)
            raise RuntimeError("once")

    def stop_when_done() -> None:
        deadline = time.monotonic() + WAIT_S
        while runner.counts.total() < 4 and time.monotonic() < deadline:
            threading.Event().wait(0.02)
        stop.set()

    with kombu.Connection(url) as connection, connection.channel() as channel:
        declare(connection, channel, inbox)
        for message_id in ("a", "b", "a"):
            kombu.Producer(channel).publish(
                b"{}", exchange="outbox", routing_key="orders.placed", message_id=message_id, content_type="application/json"
            )
    runner = Runner(inbox, url)
    watcher = threading.Thread(target=stop_when_done)
    watcher.start()
    runner.run(stop)
    watcher.join()
    assert runner.counts == {"handled": 2, "duplicate": 1, "retry": 1}
    with engine.connect() as connection:
        assert sorted(connection.execute(sa.select(effects.c.message_id)).scalars()) == ["a", "b"]


def test_stop_before_the_start(inbox: Inbox) -> None:
    inbox.transactional("#")(record)
    stop = threading.Event()
    stop.set()
    Runner(inbox, "memory://").run(stop)


def test_settings_that_cannot_work_are_refused(inbox: Inbox) -> None:
    with pytest.raises(ConfigurationError, match="no handlers"):
        Runner(inbox, "memory://")
    inbox.transactional("#")(record)
    for options, problem in (
        ({"workers": 0}, "workers must be at least 1, not 0"),
        ({"workers": 4, "prefetch": 3}, "prefetch must be at least as many as workers, .*: 3 < 4"),
        ({"grace_s": -1}, "grace must be a number of zero or more, not -1"),
    ):
        with pytest.raises(ConfigurationError, match=problem):
            Runner(inbox, "memory://", **options)


@pytest.mark.parametrize(
    ("pool", "room"),
    [
        ({}, 15),
        ({"pool_size": 3, "max_overflow": 0}, 3),
        ({"pool_size": 0}, None),
        ({"pool_size": 3, "max_overflow": -1}, None),
        ({"poolclass": sa.NullPool}, None),
    ],
)
@pytest.mark.parametrize("kind", ["plain", "async"])
def test_more_workers_than_the_pool_has_connections_for_are_refused_with_the_sum(
    pool: dict[str, Any], room: int | None, kind: str
) -> None:
    url = "postgresql+psycopg://app@127.0.0.1:1/shop"
    inbox = Inbox("shipping", sessions=sessionmaker(sa.create_engine(url, **pool)))
    if kind == "async":
        inbox = Inbox("shipping", sessions=async_sessionmaker(create_async_engine(url, **pool)))
        inbox.transactional("#")(record_async)
    else:
        inbox.transactional("#")(record)
    if room is None:
        Runner(inbox, "memory://", workers=1000)
        return
    Runner(inbox, "memory://", workers=room - 2)
    problem = rf"{room - 1} workers need {room - 1} \+ 2 = {room + 1} connections at once, and the pool .* has room for {room}: "
    with pytest.raises(ConfigurationError, match=f"{problem}give it .*pool_size={room + 1}"):
        Runner(inbox, "memory://", workers=room - 1)


async def record_async(session: AsyncSession, message: Message) -> None:
    pass


@pytest.mark.parametrize("url", ["nonsense://host", "amqp://host:port"])
def test_broker_url_that_cannot_be_used_is_refused(inbox: Inbox, url: str) -> None:
    inbox.transactional("#")(record)
    with pytest.raises(OutboxError, match="broker URL"):
        Runner(inbox, url)


def test_stop_while_the_broker_is_away(inbox: Inbox, caplog: pytest.LogCaptureFixture) -> None:
    inbox.transactional("#")(record)
    stop = threading.Event()
    consumer = threading.Thread(target=Runner(inbox, "amqp://127.0.0.1:1//").run, args=(stop,))
    consumer.start()
    deadline = time.monotonic() + WAIT_S
    while not caplog.records and time.monotonic() < deadline:
        stop.wait(0.02)
    stop.set()
    consumer.join(WAIT_S)
    assert not consumer.is_alive()
    warnings = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert warnings == ["server away, trying again"]
