"""What the tests of consumers share: a small shop with a database, a queue, and a consumer that runs in a thread."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import kombu
import sqlalchemy as sa
from amqp.exceptions import NotFound
from sqlalchemy.orm import Session, sessionmaker

import outbox
from outbox import Inbox, Message
from outbox.inbox.runner import Runner
from outbox.relay.service import run_relay
from outbox.routes import Routes
from outbox.settings import RelaySettings
from outbox.tables import DEFAULT

WAIT_S = 30
effects = sa.Table("effects", sa.MetaData(), sa.Column("message_id", sa.Text))


def until(condition: Callable[[], object], what: str = "", *, within_s: float = WAIT_S) -> None:
    """Return as soon as the condition holds; fail after a deadline."""
    deadline = time.monotonic() + within_s
    pause = threading.Event()
    while not condition():
        assert time.monotonic() < deadline, what or "the condition never came true"
        pause.wait(0.02)


def record(session: Session, message: Message) -> None:
    session.execute(effects.insert().values(message_id=message.message_id))


class Shop:
    """One application: its database with the table `effects`, its inbox, and its virtual host."""

    def __init__(self, database_url: str, broker_url: str) -> None:
        self.broker_url = broker_url
        self.engine = sa.create_engine(database_url)
        outbox.metadata.create_all(self.engine)
        effects.metadata.create_all(self.engine)
        self.inbox = self.new_inbox()

    def new_inbox(self, **options: Any) -> Inbox:
        return Inbox("shipping", sessions=sessionmaker(self.engine), **options)

    def declare(self, inbox: Inbox | None = None) -> None:
        """Declare the queue, as a consumer that ran before has."""
        from outbox.inbox.topology import declare

        with kombu.Connection(self.broker_url) as connection, connection.channel() as channel:
            declare(connection, channel, inbox or self.inbox)

    def publish(self, *message_ids: str | None, topic: str = "orders.placed", body: bytes = b"{}", **more: Any) -> None:
        """Publish one message for each id; returns when the broker has them."""
        with kombu.Connection(self.broker_url) as connection, connection.channel() as channel:
            producer = kombu.Producer(channel)
            for message_id in message_ids:
                options = {"content_type": "application/json", "content_encoding": "utf-8", "message_id": message_id} | more
                producer.publish(body, exchange="outbox", routing_key=topic, **options)
            channel.queue_declare(self.inbox.queue, passive=True)

    def publish_many(self, number: int) -> None:
        """Publish so many messages, numbered."""
        self.publish(*(f"{each:05}" for each in range(number)))

    def effects(self) -> list[str]:
        with self.engine.connect() as connection:
            return sorted(connection.execute(sa.select(effects.c.message_id)).scalars())

    def failed(self) -> list[Any]:
        """The rows of the failed messages, in the order in which they came."""
        with self.engine.connect() as connection:
            return list(connection.execute(sa.select(DEFAULT.failed).order_by(DEFAULT.failed.c.id)))

    def queued(self) -> int:
        """How many messages wait in the queue, apart from those a consumer has in hand."""
        with kombu.Connection(self.broker_url) as connection, connection.channel() as channel:
            try:
                return int(channel.queue_declare(self.inbox.queue, passive=True).message_count)
            except NotFound:
                return 0

    def lock_waits(self) -> int:
        query = "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'"
        with self.engine.connect() as connection:
            return connection.execute(sa.text(query)).scalar_one()

    def close(self) -> None:
        self.engine.dispose()


@contextmanager
def running(inbox: Inbox, broker_url: str, **options: Any) -> Iterator[Runner]:
    """Run a consumer in a thread; at the end stop it, and fail if it failed or does not end."""
    runner, stop, errors = Runner(inbox, broker_url, **options), threading.Event(), list[BaseException]()

    def run() -> None:
        try:
            runner.run(stop)
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    try:
        yield runner
    finally:
        stop.set()
        thread.join(WAIT_S)
    assert not thread.is_alive()
    assert errors == []


@contextmanager
def relaying(database_url: str, broker_url: str, routes: Routes | None = None) -> Iterator[None]:
    """Run a relay in a thread."""
    stop, errors = threading.Event(), list[BaseException]()
    settings = RelaySettings(database_url=database_url, broker_url=broker_url, routes=routes or Routes(), poll_interval_s=0.05)

    def run() -> None:
        try:
            run_relay(settings, stop)
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    yield
    stop.set()
    thread.join(WAIT_S)
    assert errors == []
