"""Wake-ups between real processes and servers: a woken relay publishes although its poll interval is a minute."""

import asyncio
import select
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psycopg
import pytest
import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.orm import Session

import outbox
from outbox.cli.exit import USAGE
from outbox.relay.hearing import Datagrams
from outbox.relay.listening import Listening
from outbox.wakeaddress import CHANNEL, parse
from tests.faults import processes
from tests.faults.observer import Observer
from tests.faults.processes import Program
from tests.faults.proxy import Proxy
from tests.integration.test_relay import left, prepared, until
from tests.servers.pgbouncer import transaction_pooler
from tests.servers.postgres import Databases, Postgres
from tests.servers.proc import free_port

EVENT = outbox.Event(topic="orders.placed", payload={"n": 1}, key="7")
PROMPTLY_S = 15.0  # of the 45 to 60 seconds to the next poll


@pytest.fixture
def engine(database_url: str) -> Iterator[sa.Engine]:
    engine = prepared(database_url)
    yield engine
    engine.dispose()


def address_of(kind: str, folder: Path) -> str:
    return {"udp": f"udp://127.0.0.1:{free_port()}", "unix": f"unix://{folder / 'relay.sock'}", "postgres": "postgres"}[kind]


def sleepy(database_url: str, vhost_url: str, wake: str, *options: str) -> Program:
    return processes.relay("relay", database_url, vhost_url, "--poll-interval", "1m", "--wake", wake, *options)


@contextmanager
def quiet(engine: sa.Engine, relay: Program) -> Iterator[None]:
    """The relay is quiet: after two looks at an empty table, the next is a poll interval off."""
    relay.wait_until_ready()
    until(lambda: idle_s(engine) > 0.5)
    yield


def idle_s(engine: sa.Engine) -> float:
    """How long ago a relay has last said something to the database; 0 before it has."""
    with engine.connect() as connection:
        return float(
            connection.execute(
                sa.text(
                    "SELECT coalesce(extract(epoch FROM clock_timestamp() - max(state_change)), 0) FROM pg_stat_activity"
                    " WHERE application_name = 'outbox-relay' AND datname = current_database()"
                )
            ).scalar_one()
        )


def enqueue(engine: sa.Engine, *, times: int = 1) -> None:
    with Session(engine) as session, session.begin():
        outbox.enqueue_many(session, [EVENT] * times)


@pytest.mark.parametrize("kind", ["udp", "unix", "postgres"])
def test_a_woken_relay_publishes_although_its_poll_interval_is_a_minute_and_stops_at_once(
    engine: sa.Engine, database_url: str, vhost_url: str, tmp_path: Path, kind: str
) -> None:
    wake = address_of(kind, tmp_path)
    outbox.wake_relay(engine, wake)
    observer = Observer(vhost_url)
    with sleepy(database_url, vhost_url, wake) as relay, quiet(engine, relay):
        began = time.monotonic()
        enqueue(engine, times=3)
        until(lambda: left(engine) == 0, timeout_s=PROMPTLY_S)
        until(lambda: idle_s(engine) > 0.5)
        relay.process.send_signal(signal.SIGTERM)
        assert relay.process.wait(5) == 0
        assert time.monotonic() - began < 60
    assert len(observer.received()) == 3
    if kind == "unix":
        assert not (tmp_path / "relay.sock").exists()


@pytest.mark.matrix
def test_a_relay_that_was_killed_is_followed_by_one_at_the_same_address(
    engine: sa.Engine, database_url: str, vhost_url: str, tmp_path: Path
) -> None:
    wake = address_of("unix", tmp_path)
    outbox.wake_relay(engine, wake)
    Observer(vhost_url)
    with sleepy(database_url, vhost_url, wake) as relay:
        relay.wait_until_ready()
        relay.kill()
        assert (tmp_path / "relay.sock").exists()
        relay.start()
        with quiet(engine, relay):
            enqueue(engine)
            until(lambda: left(engine) == 0, timeout_s=PROMPTLY_S)


@pytest.mark.parametrize("kind", ["udp", "unix"])
def test_an_address_in_use_is_a_configuration_error(
    engine: sa.Engine, database_url: str, vhost_url: str, tmp_path: Path, kind: str
) -> None:
    wake = address_of(kind, tmp_path)
    with Datagrams(parse(wake)), sleepy(database_url, vhost_url, wake) as relay:
        assert relay.process.wait(30) == USAGE
        assert f"cannot listen on {wake}" in relay.log
        assert "Traceback" not in relay.log


# NOTIFY


@contextmanager
def listener(url: str) -> Iterator[psycopg.Connection]:
    """A plain client that listens."""
    with psycopg.connect(url.replace("+psycopg", ""), autocommit=True) as connection:
        connection.execute(f"LISTEN {CHANNEL}")
        yield connection


def heard(connection: psycopg.Connection) -> list[str]:
    """The payloads of what has come. A notification is there before the answer to a statement that is sent after it."""
    connection.execute("SELECT 1")
    return [each.payload for each in connection.notifies(timeout=0)]


def test_one_notification_for_a_commit_of_many_events_and_none_for_a_rollback(engine: sa.Engine, database_url: str) -> None:
    outbox.wake_relay(engine, "postgres")
    with listener(database_url) as connection:
        enqueue(engine, times=1000)
        assert heard(connection) == [""]
        with engine.begin() as target:
            for _ in range(3):
                outbox.enqueue(target, EVENT)
            assert heard(connection) == []
        assert heard(connection) == [""]

        with Session(engine) as session:
            outbox.enqueue(session, EVENT)
            session.flush()
            session.rollback()
            session.execute(sa.text("SELECT 1"))
            session.commit()
        assert heard(connection) == []


def test_after_a_savepoint_that_was_rolled_back_what_follows_it_still_notifies(engine: sa.Engine, database_url: str) -> None:
    outbox.wake_relay(engine, "postgres")
    with listener(database_url) as connection, Session(engine) as session, session.begin():
        nested = session.begin_nested()
        outbox.enqueue(session, EVENT)
        session.flush()
        nested.rollback()
        outbox.enqueue(session, EVENT)
        session.commit()
        assert heard(connection) == [""]


def test_a_transaction_that_has_failed_is_rolled_back_as_it_would_be_without(engine: sa.Engine, database_url: str) -> None:
    outbox.wake_relay(engine, "postgres")
    with listener(database_url) as connection, engine.connect() as target:
        target.begin()
        outbox.enqueue(target, EVENT)
        with pytest.raises(sa.exc.DBAPIError):
            target.execute(sa.text("SELECT 1/0"))
        target.commit()
        assert heard(connection) == []
    assert left(engine) == 0


def test_asyncio_notifies_too(engine: sa.Engine, database_url: str) -> None:
    async def run() -> None:
        async_engine = create_async_engine(database_url)
        outbox.wake_relay(async_engine, "postgres")
        async with AsyncSession(async_engine) as session, session.begin():
            outbox.enqueue(session, EVENT)
        await async_engine.dispose()

    with listener(database_url) as connection:
        asyncio.run(run())
        assert heard(connection) == [""]


class Ear:
    """A `Listening` in this process, waited for as a relay does."""

    def __init__(self, listening: Listening) -> None:
        self.listening = listening

    def woken(self, timeout_s: float = PROMPTLY_S) -> bool:
        ready, _, _ = select.select([self.listening], [], [], timeout_s)
        self.listening.clear()
        return bool(ready)


@contextmanager
def listening(url: str, **options: float) -> Iterator[Ear]:
    with Listening(url, **options) as made:
        ear = Ear(made)
        assert ear.woken(), "it listens"
        assert ear.woken(), "and hears its own echo"
        yield ear


def listeners(engine: sa.Engine) -> int:
    with engine.connect() as connection:
        query = (
            "SELECT count(*) FROM pg_stat_activity WHERE application_name = 'outbox-relay-wake' AND datname = current_database()"
        )
        return int(connection.execute(sa.text(query)).scalar_one())


def test_a_listener_whose_connection_is_cut_listens_again(engine: sa.Engine, database_url: str, postgres: Databases) -> None:
    outbox.wake_relay(engine, "postgres")
    with listening(database_url) as ear:
        for _ in range(3):
            postgres.terminate_backends(database_url)
            assert ear.woken(), "it listens anew, and wakes for what was committed meanwhile"
            enqueue(engine)
            assert ear.woken()
        assert listeners(engine) == 1, "no connection is left behind"
    until(lambda: listeners(engine) == 0)


def test_a_listener_that_is_cut_off_in_silence_notices_and_listens_again(engine: sa.Engine, database_url: str) -> None:
    """Half open: what it sends is lost, and nothing comes."""
    outbox.wake_relay(engine, "postgres")
    with Proxy(database_url) as proxy, listening(proxy.url, check_every_s=0.3, answer_s=0.5) as ear:
        proxy.lose()
        assert ear.woken(), "it listens anew"
        enqueue(engine)
        assert ear.woken()


def test_while_it_is_well_it_asks_for_a_sign_of_life_and_keeps_its_connection(engine: sa.Engine, database_url: str) -> None:
    outbox.wake_relay(engine, "postgres")
    with Proxy(database_url) as proxy, listening(proxy.url, check_every_s=0.02) as ear:
        before = proxy.connections
        assert not ear.woken(0.5)
        enqueue(engine)
        assert ear.woken()
        assert proxy.connections == before


def test_a_relay_under_listen_goes_on_after_postgresql_was_restarted(own_postgres: Postgres, vhost_url: str) -> None:
    url = own_postgres.create_database()
    engine = prepared(url)
    outbox.wake_relay(engine, "postgres")
    Observer(vhost_url)
    with sleepy(url, vhost_url, "postgres") as relay:
        for _ in range(2):
            with quiet(engine, relay):
                enqueue(engine)
                until(lambda: left(engine) == 0, timeout_s=PROMPTLY_S)
            own_postgres.restart()
            until(lambda: listeners(engine) == 1)
        assert relay.terminate() == 0
        assert "Traceback" not in relay.log
    engine.dispose()


def test_with_the_database_away_a_relay_under_listen_stops_at_once(own_postgres: Postgres, vhost_url: str) -> None:
    url = own_postgres.create_database()
    prepared(url).dispose()
    with sleepy(url, vhost_url, "postgres") as relay:
        relay.wait_until_ready()
        own_postgres.stop()
        relay.wait_for_log("wake-up by LISTEN")
        began = time.monotonic()
        assert relay.terminate() == 0
        assert time.monotonic() - began < 5
    own_postgres.start()


def test_behind_a_transaction_pooler_it_says_that_it_hears_nothing_and_a_direct_url_helps(
    engine: sa.Engine, database_url: str, vhost_url: str
) -> None:
    Observer(vhost_url)
    with transaction_pooler(database_url) as through:
        pooled = sa.create_engine(through, poolclass=sa.NullPool)
        outbox.wake_relay(pooled, "postgres")
        with processes.relay("relay", through, vhost_url, "--wake", "postgres") as relay:
            relay.wait_for_log("no wake-up comes through by LISTEN")
            enqueue(pooled)
            until(lambda: left(engine) == 0)  # it polls
            assert relay.terminate() == 0

        with sleepy(through, vhost_url, "postgres", "--wake-database-url", database_url) as relay:
            relay.wait_until_ready()
            until(lambda: listeners(engine) == 1)
            enqueue(pooled)
            until(lambda: left(engine) == 0, timeout_s=PROMPTLY_S)
            assert "no wake-up" not in relay.log
            assert relay.terminate() == 0
