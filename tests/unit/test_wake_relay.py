"""A producer wakes the relays after its commit: once, only when it has enqueued something, and never at its own cost."""

import asyncio
import os
import socket
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
import sqlalchemy as sa
from sqlalchemy.exc import IntegrityError
from sqlalchemy.ext.asyncio import AsyncSession, async_scoped_session, async_sessionmaker, create_async_engine
from sqlalchemy.orm import Session, scoped_session, sessionmaker

from outbox import ConfigurationError, Event, datagrams, enqueue, enqueue_many, wake_relay
from outbox.identity import new_message_id
from outbox.tables import DEFAULT
from outbox.wakeaddress import parse

EVENT = Event(topic="orders.placed", payload={"n": 1}, key="7")


class Receiver:
    """A relay's ear."""

    def __init__(self, family: socket.AddressFamily, where: object) -> None:
        self.socket = socket.socket(family, socket.SOCK_DGRAM)
        self.socket.bind(where)
        self.socket.setblocking(False)

    def heard(self) -> int:
        """How many datagrams have come since the last look. On one host they are there when `sendto` returns."""
        count = 0
        while True:
            try:
                self.socket.recv(100)
            except BlockingIOError:
                return count
            count += 1


@pytest.fixture(params=["udp", "unix"])
def receiver(request, tmp_path) -> Iterator[Receiver]:
    if request.param == "udp":
        made = Receiver(socket.AF_INET, ("127.0.0.1", 0))
        made.address = f"udp://127.0.0.1:{made.socket.getsockname()[1]}"
    else:
        path = str(tmp_path / "relay.sock")
        made = Receiver(socket.AF_UNIX, path)
        made.address = f"unix://{path}"
    yield made
    made.socket.close()


@pytest.fixture
def engine(tmp_path) -> Iterator[sa.Engine]:
    engine = sa.create_engine(f"sqlite:///{tmp_path / 'test.db'}")
    DEFAULT.metadata.create_all(engine)
    yield engine
    engine.dispose()


@pytest.fixture(autouse=True)
def unlimited(monkeypatch) -> None:
    """Let every commit send: how often at most is a test of its own."""
    monkeypatch.setattr(datagrams, "EVERY_S", 0)


def by_session(engine, heard):
    with Session(engine) as session:
        enqueue(session, EVENT)
        session.flush()
        assert heard() == 0
        session.commit()


def by_connection(engine, heard):
    with engine.begin() as connection:
        enqueue(connection, EVENT)
        assert heard() == 0


def by_connection_that_stays_open(engine, heard):
    connection = engine.connect()
    enqueue_in_begun(connection)
    try:
        assert heard() == 1
    finally:
        enqueue_in_begun(connection)  # for the one that the caller counts
        connection.close()


def enqueue_in_begun(connection):
    with connection.begin():
        enqueue(connection, EVENT)


def by_session_on_an_outer_transaction(engine, heard):
    with engine.begin() as connection, Session(connection, join_transaction_mode="create_savepoint") as session:
        enqueue(session, EVENT)
        session.commit()
        assert heard() == 0, "the commit was one of a savepoint"


def by_engine_with_options(engine, heard):
    with engine.execution_options(schema_translate_map=None).begin() as connection:
        enqueue(connection, EVENT)


def in_savepoint(engine, heard):
    with Session(engine) as session, session.begin(), session.begin_nested():
        enqueue(session, EVENT)


def many_events(engine, heard):
    with Session(engine) as session, session.begin():
        enqueue_many(session, [EVENT] * 500)
        session.flush()
        enqueue_many(session.connection(), [EVENT] * 500)


@pytest.mark.parametrize(
    "commit",
    [
        by_session,
        by_connection,
        by_connection_that_stays_open,
        by_session_on_an_outer_transaction,
        by_engine_with_options,
        in_savepoint,
        many_events,
    ],
)
def test_a_commit_that_enqueued_sends_one_datagram_after_it(engine, receiver, commit):
    wake_relay(engine, receiver.address)
    commit(engine, receiver.heard)

    assert receiver.heard() == 1


def test_what_it_announces_is_there_to_be_read(engine, receiver, monkeypatch):
    """The other connection sees the row at the moment at which the datagram goes out."""
    seen = []

    def look(_sender):
        with engine.connect() as other:
            seen.append(other.execute(sa.select(sa.func.count()).select_from(DEFAULT.message)).scalar_one())

    monkeypatch.setattr(datagrams.Sender, "wake", look)
    wake_relay(engine, receiver.address)
    with engine.connect() as connection:
        enqueue_in_begun(connection)
        with Session(engine) as session:
            enqueue(session, EVENT)
            session.commit()

    assert seen == [1, 2]


def rolled_back(engine):
    with Session(engine) as session:
        enqueue(session, EVENT)
        session.flush()
        session.rollback()


def left_without_a_commit(engine):
    with engine.connect() as connection:
        connection.begin()
        enqueue(connection, EVENT)


def failed(engine):
    with suppress(RuntimeError), engine.begin() as connection:
        enqueue(connection, EVENT)
        raise RuntimeError


def failed_flush(engine):
    with Session(engine) as session:
        twice = Event(topic="a", payload=1, message_id=new_message_id())
        enqueue_many(session, [twice, twice])
        with pytest.raises(IntegrityError):
            session.commit()


def enqueued_nothing(engine):
    with engine.begin() as connection:
        enqueue_many(connection, [])
        connection.execute(sa.select(DEFAULT.message))


@pytest.mark.parametrize("use", [rolled_back, left_without_a_commit, failed, failed_flush, enqueued_nothing])
def test_nothing_is_sent_for_a_rollback_nor_for_a_commit_after_it_that_enqueues_nothing(engine, receiver, use):
    wake_relay(engine, receiver.address)
    use(engine)
    with engine.begin() as connection:  # on the same connection of the pool
        connection.execute(sa.update(DEFAULT.partition).values(published=0))

    assert receiver.heard() == 0


def test_another_engine_sends_nothing(engine, receiver, tmp_path):
    wake_relay(engine, receiver.address)
    other = sa.create_engine(engine.url)
    by_connection(other, receiver.heard)
    other.dispose()

    assert receiver.heard() == 0


@pytest.mark.parametrize("source", [lambda engine: engine, sessionmaker, lambda engine: scoped_session(sessionmaker(engine))])
def test_an_engine_and_factories_of_sessions_say_whose_commits_are_meant(engine, receiver, source):
    wake_relay(source(engine), receiver.address)
    by_session(engine, receiver.heard)

    assert receiver.heard() == 1


@pytest.mark.parametrize("kind", ["engine", "sessions", "scoped"])
def test_asyncio_too(engine, receiver, kind):
    async def run() -> None:
        async_engine = create_async_engine(str(engine.url).replace("sqlite:", "sqlite+aiosqlite:"))
        sessions = async_sessionmaker(async_engine)
        sources = {"engine": async_engine, "sessions": sessions, "scoped": async_scoped_session(sessions, asyncio.current_task)}
        wake_relay(sources[kind], receiver.address)
        async with AsyncSession(async_engine) as session, session.begin():
            enqueue(session, EVENT)
        assert receiver.heard() == 1
        async with async_engine.begin() as connection:
            await enqueue(connection, EVENT)
        await async_engine.dispose()

    asyncio.run(run())
    assert receiver.heard() == 1


def test_called_again_it_adds_what_is_new(engine, receiver):
    for _ in range(3):
        wake_relay(engine, receiver.address, "udp://127.0.0.1:9")
    wake_relay(engine, receiver.address)
    by_connection(engine, receiver.heard)

    assert receiver.heard() == 1


def test_at_most_one_in_a_millisecond(engine, receiver, monkeypatch):
    now = [0.0]
    monkeypatch.setattr(datagrams, "monotonic", lambda: now[0])
    monkeypatch.setattr(datagrams, "EVERY_S", 0.001)
    wake_relay(engine, receiver.address)
    for now[0] in (1.0, 1.0004, 1.0009, 1.0011, 1.0012, 5.0):
        by_connection(engine, lambda: 0)

    assert receiver.heard() == 3


def test_nobody_there_costs_the_caller_nothing_and_a_relay_that_comes_back_is_reached_at_once(engine, receiver):
    wake_relay(engine, receiver.address)
    family, where = receiver.socket.family, receiver.socket.getsockname()
    receiver.socket.close()
    for _ in range(3):
        by_connection(engine, lambda: 0)
    if family == socket.AF_UNIX:
        Path(where).unlink()
    receiver.socket = Receiver(family, where).socket
    by_connection(engine, lambda: 0)

    assert receiver.heard() == 1


def test_a_relay_that_reads_nothing_delays_nobody(engine, receiver):
    sender = datagrams.Sender(parse(receiver.address))
    for _ in range(5000):
        sender.wake()
    by_connection(engine, lambda: 0)

    assert receiver.heard() > 0


def test_without_a_descriptor_left_the_commit_still_stands(engine, receiver, monkeypatch):
    def none_left(*_):
        raise OSError(24, "Too many open files")

    wake_relay(engine, receiver.address)
    monkeypatch.setattr(datagrams.socket, "socket", none_left)
    by_connection(engine, lambda: 0)
    with engine.connect() as connection:
        assert connection.execute(sa.select(sa.func.count()).select_from(DEFAULT.message)).scalar_one() == 1


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_both_sides_of_a_fork_send_although_the_child_has_closed_all_that_it_inherited(engine, receiver):
    wake_relay(engine, receiver.address)
    by_connection(engine, receiver.heard)
    engine.dispose()
    if (child := os.fork()) == 0:
        code = 1
        try:
            os.closerange(3, 1000)  # as one does that becomes a daemon
            by_connection(engine, lambda: 0)
            code = 0
        finally:
            os._exit(code)

    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert receiver.heard() == 2
    by_connection(engine, lambda: 0)
    assert receiver.heard() == 1


def test_threads_may_commit_at_once(engine, receiver):
    sender = datagrams.Sender(parse(receiver.address))
    threads = [threading.Thread(target=sender.wake) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert receiver.heard() == 8


@pytest.mark.parametrize(
    ("address", "problem"),
    [
        ("localhost:7411", "is no address; write udp://"),
        ("udp://127.0.0.1", "is no address"),
        ("udp://127.0.0.1:0", "is no address"),
        ("udp://127.0.0.1:70000", "is no address"),
        ("unix://relay.sock", "is no address"),
        ("unix:///run/", "is no address"),
        ("unix:///" + "x" * 107, "longer than the 107 bytes"),
        ("tcp://127.0.0.1:7411", "is no address"),
        ("postgresql://db/shop", "is no address"),
        ("postgres", "needs a PostgreSQL database, not 'sqlite'"),
        ("udp://no-such-host.invalid:7411", "cannot be found"),
    ],
)
def test_an_address_that_cannot_work_is_an_error_at_once(engine, address, problem):
    with pytest.raises(ConfigurationError, match=problem):
        wake_relay(engine, address)


def test_what_cannot_be_woken_from_is_an_error_at_once(engine):
    with pytest.raises(ConfigurationError, match="name at least one address"):
        wake_relay(engine)
    with pytest.raises(ConfigurationError, match="have no engine"):
        wake_relay(sessionmaker(), "udp://127.0.0.1:7411")
    with pytest.raises(TypeError, match="expected an engine or a factory of sessions"):
        wake_relay("udp://127.0.0.1:7411")
