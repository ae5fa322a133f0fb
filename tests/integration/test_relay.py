"""The relay as a real process, through outages and signals; judged from tables and from what a plain client received."""

import signal
import socket
import threading
import time
from collections.abc import Callable
from typing import Any, Self
from urllib.parse import urlsplit

import amqp
import pytest
import sqlalchemy as sa

import outbox
from outbox.migrations import LATEST
from outbox.migrations.sql import apply
from outbox.tables import DEFAULT
from tests.faults import processes, shop
from tests.faults.observer import Observer
from tests.servers.postgres import Postgres
from tests.servers.rabbitmq import RabbitMQ


def prepared(url: str) -> sa.Engine:
    """Return an engine for a database with all tables."""
    engine = sa.create_engine(url, poolclass=sa.NullPool)
    with engine.begin() as connection:
        apply(connection, range(1, LATEST + 1))
        shop.metadata.create_all(connection)
    return engine


def enqueue(engine: sa.Engine, count: int, *, topic: str = "orders.placed", first: int = 0) -> None:
    with engine.begin() as connection:
        events = [
            outbox.Event(topic=topic, payload={"number": str(number)}, key=f"k{number % 50}")
            for number in range(first, first + count)
        ]
        outbox.enqueue_many(connection, events)
        orders = [{"number": str(number), "customer": "c"} for number in range(first, first + count)]
        connection.execute(sa.insert(shop.order), orders)


def left(engine: sa.Engine) -> int:
    with engine.connect() as connection:
        return connection.execute(sa.select(sa.func.count()).select_from(DEFAULT.message)).scalar_one()


def until(condition: Callable[[], bool], *, timeout_s: float = 60) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.02)


def message_ids(messages: list[amqp.Message]) -> list[str]:
    return [message.properties["message_id"] for message in messages]


def test_sigterm_under_load_ends_within_the_grace_and_publishes_nothing_twice(database_url: str, vhost_url: str) -> None:
    engine = prepared(database_url)
    enqueue(engine, 5000)
    observer = Observer(vhost_url)
    with processes.relay("relay", database_url, vhost_url, "--batch-size", "500") as relay:
        until(lambda: left(engine) < 4500)

        began = time.monotonic()
        assert relay.terminate(timeout_s=20) == 0
        took_s = time.monotonic() - began

    remaining = left(engine)
    arrived = message_ids(observer.received())
    assert took_s < 20
    assert 0 < remaining < 4500, "the stop came in the middle of the work"
    assert len(arrived) == len(set(arrived)) == 5000 - remaining
    with engine.connect() as connection:
        assert connection.execute(sa.select(sa.func.count(DEFAULT.partition.c.lease_owner))).scalar_one() == 0


def test_a_second_signal_stops_at_once(database_url: str, own_rabbitmq: RabbitMQ) -> None:
    engine = prepared(database_url)
    broker_url = own_rabbitmq.create_vhost()
    Observer(broker_url)
    with processes.relay("relay", database_url, broker_url) as relay:
        enqueue(engine, 1)
        until(lambda: left(engine) == 0)
        with own_rabbitmq.suspended():  # no confirm comes: what is in flight would take the whole grace
            enqueue(engine, 10, first=1)
            until(lambda: scalar(engine, sa.select(sa.func.count(DEFAULT.partition.c.lease_owner))) > 0)
            relay.process.send_signal(signal.SIGTERM)
            relay.wait_for_log("stopping")
            relay.process.send_signal(signal.SIGINT)
            assert relay.process.wait(5) == 130


@pytest.mark.timeout(240)
def test_while_the_broker_is_away_nothing_is_lost_no_attempt_is_spent_and_the_relay_does_not_spin(
    database_url: str, own_rabbitmq: RabbitMQ
) -> None:
    engine = prepared(database_url)
    broker_url = own_rabbitmq.create_vhost()
    observer = Observer(broker_url)
    with processes.relay("relay", database_url, broker_url) as relay:
        enqueue(engine, 100)
        until(lambda: left(engine) == 0)

        own_rabbitmq.stop()
        with Nobody(broker_url) as nobody:
            began = time.monotonic()
            enqueue(engine, 300, first=100)
            until(lambda: time.monotonic() - began > 20 and nobody.calls > 0)
            away_s = time.monotonic() - began
        assert relay.process.poll() is None
        assert nobody.calls <= 4 + away_s, "pauses grow to at least 2.5 s, so 20 s take about a dozen tries"
        assert relay.log.count("server away") <= 2
        with engine.connect() as connection:
            attempts, rows = connection.execute(sa.select(sa.func.max(DEFAULT.message.c.attempts), sa.func.count())).one()
        assert (attempts, rows) == (0, 300)

        own_rabbitmq.start()
        until(lambda: left(engine) == 0)
        assert relay.terminate() == 0
    assert len(set(message_ids(observer.received()))) == 400


class Nobody:
    """Answers in the broker's place, hangs up on every caller, and counts them."""

    def __init__(self, url: str) -> None:
        self.calls = 0
        self._socket = socket.create_server(("127.0.0.1", urlsplit(url).port or 0))
        self._thread = threading.Thread(target=self._answer)

    def _answer(self) -> None:
        while True:
            try:
                caller, _ = self._socket.accept()
            except OSError:
                return
            self.calls += 1
            caller.close()

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        self._thread.join()


@pytest.mark.timeout(240)
def test_relay_and_consumer_go_on_by_themselves_after_postgresql_was_restarted(own_postgres: Postgres, vhost_url: str) -> None:
    url = own_postgres.create_database()
    engine = prepared(url)
    with processes.relay("relay", url, vhost_url) as relay, processes.consumer("consumer", url, vhost_url) as consumer:
        consumer.wait_until_ready()
        for restarts in range(3):
            enqueue(engine, 300, first=300 * restarts)
            until(lambda: 0 < left(engine) < 300 or left(engine) == 0)
            own_postgres.restart()
        until(lambda: left(engine) == 0)
        until(lambda: len(effects(engine)) >= 900)
        assert relay.terminate() == 0
        assert consumer.terminate() == 0
    assert sorted(effects(engine), key=int) == [str(number) for number in range(900)]


def effects(engine: sa.Engine) -> list[str]:
    with engine.connect() as connection:
        return list(connection.execute(sa.select(shop.effect.c.number)).scalars())


def test_an_unroutable_message_is_never_recorded_as_sent_and_goes_out_once_a_queue_is_bound(
    database_url: str, vhost_url: str
) -> None:
    engine = prepared(database_url)
    message = DEFAULT.message
    with processes.relay("relay", database_url, vhost_url, "--retry-first", "500ms", "--retry-ceiling", "1s") as relay:
        enqueue(engine, 3, topic="nobody.listens")
        tries = sa.select(sa.func.count()).where(message.c.attempts > 1, message.c.last_error.contains("unroutable"))
        until(lambda: scalar(engine, tries) == 3)
        assert scalar(engine, sa.select(sa.func.sum(DEFAULT.partition.c.published))) == 0

        observer = Observer(vhost_url)
        until(lambda: left(engine) == 0)
        assert relay.terminate() == 0
    assert len(observer.received()) == 3
    assert scalar(engine, sa.select(sa.func.sum(DEFAULT.partition.c.published))) == 3


def scalar(engine: sa.Engine, query: sa.Select[Any]) -> int:
    with engine.connect() as connection:
        return int(connection.execute(query).scalar_one())
