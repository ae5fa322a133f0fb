"""`once` and `leased` in a loop of one's own, as the manual shows it: with kombu, and with Redis Streams."""

from collections.abc import Callable, Iterator
from typing import Any

import kombu
import pytest
import redis
import sqlalchemy as sa
from sqlalchemy.orm import Session, sessionmaker

import outbox
from outbox.inbox import leased, once
from outbox.inbox.ids import message_id_of
from tests.integration.consuming import effects

Sessions = sessionmaker[Any]
Handle = Callable[[Session, Any], None]


def handle_one_of_kombu(queue: kombu.Queue, sessions: Sessions, ship: Handle) -> bool:
    """Handle the next message of a queue, once; return whether there was one."""
    received = queue.get()
    if received is None:
        return False
    message_id = message_id_of(received.properties, received.headers)
    if message_id is None:
        received.reject()  # to the dead letters: nobody can tell whether it comes again
        return True
    with sessions.begin() as session, once(session, "shipping", message_id) as first:
        if first:
            ship(session, received.payload)
    received.ack()  # after the COMMIT: a crash before it brings the message again, and it is a duplicate
    return True


def handle_some_of_a_stream(client: redis.Redis, me: str, sessions: Sessions, ship: Handle, *, idle_ms: int = 60_000) -> int:
    """Handle new entries of a stream and those that another consumer has left unacknowledged; return how many there were."""
    _, left_behind, _ = client.xautoclaim("orders", "shipping", me, min_idle_time=idle_ms)
    new = client.xreadgroup("shipping", me, {"orders": ">"}, count=10)
    entries = [*left_behind, *(entry for _, found in new for entry in found)]
    for entry_id, fields in entries:
        # The producer's own id: one that published twice, because the reply was lost, has made two entries.
        with sessions.begin() as session, once(session, "shipping", fields["message_id"]) as first:
            if first:
                ship(session, fields)
        client.xack("orders", "shipping", entry_id)
    return len(entries)


def charge_one_of_kombu(queue: kombu.Queue, sessions: Sessions, charge: Callable[[str], str]) -> str:
    """Have an effect outside the database for the next message; return what came of it, now or the first time."""
    received = queue.get()
    with leased(sessions, "payments", received.properties["message_id"]) as lease:
        if lease.first:
            result = charge(lease.idempotency_key)
            lease.complete(result)
        else:
            result = lease.result
    received.ack()
    return result


class PowerCut(Exception):
    """Stands for the end of the process."""


@pytest.fixture
def sessions(database_url: str) -> Iterator[Sessions]:
    engine = sa.create_engine(database_url)
    outbox.metadata.create_all(engine)
    effects.metadata.create_all(engine)
    yield sessionmaker(engine)
    engine.dispose()


def effects_in(sessions: Sessions) -> list[str]:
    with sessions() as session:
        return sorted(session.execute(sa.select(effects)).scalars())


def ship(session: Session, order: Any) -> None:
    session.execute(effects.insert().values(message_id=order["n"]))


def ship_and_die(session: Session, order: Any) -> None:
    ship(session, order)
    raise PowerCut


@pytest.mark.parametrize("dies", ["before the COMMIT", "before the ack"])
def test_a_loop_with_kombu_has_each_effect_once(dies: str, sessions: Sessions, vhost_url: str) -> None:
    with kombu.Connection(vhost_url) as connection:
        queue = kombu.Queue("shipping", channel=connection)
        queue.declare()
        for message_id in ("a", "a", "b"):
            kombu.Producer(connection).publish({"n": message_id}, routing_key="shipping", message_id=message_id)
    with kombu.Connection(vhost_url) as connection:
        queue = kombu.Queue("shipping", channel=connection.channel())
        if dies == "before the COMMIT":
            with pytest.raises(PowerCut):
                handle_one_of_kombu(queue, sessions, ship_and_die)
            assert effects_in(sessions) == []
        else:
            received = queue.get()
            with sessions.begin() as session, once(session, "shipping", "a"):
                ship(session, received.payload)
        connection.collect()  # no goodbye
    with kombu.Connection(vhost_url) as connection:
        queue = kombu.Queue("shipping", channel=connection.channel())
        handled = 0
        while handle_one_of_kombu(queue, sessions, ship):
            handled += 1
    assert handled == 3
    assert effects_in(sessions) == ["a", "b"]


@pytest.mark.parametrize("dies", ["before the COMMIT", "before the ack"])
def test_a_loop_with_redis_streams_has_each_effect_once(dies: str, sessions: Sessions, redis_url: str) -> None:
    with redis.Redis.from_url(redis_url, protocol=2, decode_responses=True) as client:
        client.xgroup_create("orders", "shipping", id="0", mkstream=True)
        for message_id in ("a", "a", "b"):
            client.xadd("orders", {"message_id": message_id, "n": message_id})
        if dies == "before the COMMIT":
            with pytest.raises(PowerCut):
                handle_some_of_a_stream(client, "first", sessions, ship_and_die)
            assert effects_in(sessions) == []
        else:
            client.xreadgroup("shipping", "first", {"orders": ">"})
            with sessions.begin() as session, once(session, "shipping", "a"):
                ship(session, {"n": "a"})
        assert handle_some_of_a_stream(client, "second", sessions, ship, idle_ms=0) == 3
        assert client.xpending("orders", "shipping")["pending"] == 0
    assert effects_in(sessions) == ["a", "b"]


def test_a_loop_with_a_lease_asks_the_other_system_once(sessions: Sessions, vhost_url: str) -> None:
    asked: list[str] = []

    def charge(key: str) -> str:
        asked.append(key)
        return "charged"

    with kombu.Connection(vhost_url) as connection:
        queue = kombu.Queue("payments", channel=connection)
        queue.declare()
        for _ in range(2):
            kombu.Producer(connection).publish({}, routing_key="payments", message_id="a")
        assert [charge_one_of_kombu(queue, sessions, charge) for _ in range(2)] == ["charged", "charged"]
    assert len(asked) == 1
