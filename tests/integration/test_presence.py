"""Leases of a relay whose process is gone are taken over before they run out, and those of one that lives are not."""

import math
import threading

import psycopg
import pytest
import sqlalchemy as sa

from outbox import clock
from outbox.policies import Policies
from outbox.publishers.flight import CONFIRMED
from outbox.relay import Transactions, presence
from outbox.relay.batch import Lease
from outbox.relay.presence import Presence
from outbox.relay.stopping import Stopping
from outbox.store import presence as store
from outbox.store.engine import open_engine
from outbox.tables import DEFAULT
from tests.rows import insert, partition
from tests.servers.proc import free_port


@pytest.fixture(autouse=True)
def at_once(monkeypatch):
    for name in ("LOOK_EVERY_S", "GRACE_S", "SETTLE_S"):
        monkeypatch.setattr(presence, name, 0.0)


@pytest.fixture
def here(database_url):
    """Presences, closed at the end."""
    made = []

    def make(owner, url=database_url):
        made.append(Presence(open_engine(url, application_name=owner, pool_size=1), DEFAULT, owner=owner))
        return made[-1]

    yield make
    for each in made:
        each.close()


def relay(engine, owner, presence=None):
    return Transactions(engine, DEFAULT, owner=owner, lease_s=30, batch_size=1000, policies=Policies(), presence=presence)


def lease_of(batch, presence):
    stopping = Stopping(threading.Event(), grace_s=1)
    return Lease(batch, stopping, lease_s=30, renew=set, intact=presence.intact)


def owners(engine):
    with engine.connect() as connection:
        return set(connection.execute(sa.select(partition.c.lease_owner).where(partition.c.lease_owner.is_not(None))).scalars())


def session_of(connection, owner):
    find = sa.text("SELECT pid FROM pg_stat_activity WHERE application_name = :owner AND datname = current_database()")
    return connection.execute(find, {"owner": owner}).scalar_one_or_none()


def end_session(engine, owner):
    """End a relay's session, as an administrator does, and wait until it has ended."""
    with engine.connect() as connection:
        pid = session_of(connection, owner)
        assert connection.execute(sa.text("SELECT pg_terminate_backend(:pid, 10000)"), {"pid": pid}).scalar_one()


def leave(engine, presence):
    """Close it, and wait until the server knows."""
    presence.close()
    with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        while session_of(connection, presence.name) is not None:
            pass


def test_what_a_dead_relay_held_is_claimed_at_once(engine, here):
    dead = here("dead")
    insert(engine, "a", "b")
    held = relay(engine, "dead", dead).claim()
    assert owners(engine) == {dead.name}
    leave(engine, dead)
    taken = relay(engine, "survivor", here("survivor")).claim()
    assert [row.id for row in taken.rows] == [row.id for row in held.rows]
    assert all(taken.leases[place] > token for place, token in held.leases.items())


def test_a_relay_that_lives_keeps_its_leases(engine, here):
    insert(engine, "a", "b")
    assert relay(engine, "alive", here("alive")).claim() is not None
    assert relay(engine, "other", here("other")).claim() is None


def test_a_relay_without_a_lock_keeps_its_leases_for_their_time(engine, here):
    insert(engine, "a")
    assert relay(engine, "without").claim() is not None
    assert relay(engine, "other", here("other")).claim() is None


def test_two_survivors_who_look_at_once_both_see_that_it_is_gone(engine, here):
    dead, one, other = here("dead"), here("one"), here("other")
    insert(engine, "a")
    assert relay(engine, "dead", dead).claim() is not None
    name = dead.name
    leave(engine, dead)
    for each in (one, other):
        each.renew()
    with engine.begin() as first, engine.begin() as second:
        assert one.gone(first) == {name}
        assert other.gone(second) == {name}


def test_it_must_be_found_gone_twice(engine, here, monkeypatch):
    dead = here("dead")
    insert(engine, "a")
    assert relay(engine, "dead", dead).claim() is not None
    leave(engine, dead)
    now = clock.seconds()
    monkeypatch.setattr(clock, "seconds", lambda: now)
    monkeypatch.setattr(presence, "GRACE_S", 0.3)
    lasting = here("survivor")
    survivor = relay(engine, "survivor", lasting)
    assert lasting.wait_s == math.inf
    assert survivor.claim() is None
    assert lasting.wait_s == 0.3
    now += 0.31
    assert survivor.claim() is not None
    assert lasting.wait_s == math.inf


def test_whoever_has_just_come_judges_nobody(engine, here, monkeypatch):
    dead = here("dead")
    insert(engine, "a")
    assert relay(engine, "dead", dead).claim() is not None
    leave(engine, dead)
    monkeypatch.setattr(presence, "SETTLE_S", 10.0)
    assert relay(engine, "survivor", here("survivor")).claim() is None


def test_one_that_lost_its_session_alone_sends_nothing_more_and_is_fenced(engine, here):
    alive = here("alive")
    transactions = relay(engine, "alive", alive)
    insert(engine, "a")
    batch = transactions.claim()
    lease, name = lease_of(batch, alive), alive.name
    assert lease.may_send()
    end_session(engine, "alive")
    while alive.intact():  # the server's last words come before the end
        pass
    assert not lease.may_send()
    other = relay(engine, "other", here("other"))
    taken = other.claim()
    assert transactions.settle(batch, {row.id: CONFIRMED for row in batch.rows}).fenced == 1
    assert other.settle(taken, {row.id: CONFIRMED for row in taken.rows}).fenced == 0
    alive._due_at = 0.0
    insert(engine, "a")
    assert transactions.claim() is not None
    assert alive.name not in (name, "alive")
    assert alive.intact()


def test_one_that_lost_its_session_alone_settles_what_nobody_has_taken(engine, here):
    alive = here("alive")
    transactions = relay(engine, "alive", alive)
    insert(engine, "a")
    batch = transactions.claim()
    end_session(engine, "alive")
    while alive.intact():
        pass
    assert transactions.settle(batch, {row.id: CONFIRMED for row in batch.rows}).fenced == 0


def test_behind_a_pooler_there_is_no_lock(engine, here, monkeypatch):
    # What a pooler tells its clients is not the server's process.
    monkeypatch.setattr(psycopg.ConnectionInfo, "backend_pid", property(lambda _info: 1))
    pooled = here("pooled")
    insert(engine, "a")
    assert relay(engine, "pooled", pooled).claim() is not None
    assert owners(engine) == {"pooled"}
    assert pooled.intact()
    monkeypatch.undo()
    assert relay(engine, "other", here("other")).claim() is None


def test_it_works_without_a_lock_where_no_session_is_to_be_had(engine, here):
    nowhere = here("nowhere", url=f"postgresql://outbox@127.0.0.1:{free_port()}/none")
    insert(engine, "a")
    assert relay(engine, "nowhere", nowhere).claim() is not None
    assert owners(engine) == {"nowhere"}
    assert nowhere.intact()


@pytest.mark.parametrize("name", ["host:1:abc", "a@b", "host:1:abc@zzzzzzzzzzzzzzzz", "@"])
def test_a_name_without_a_lock_is_none(name):
    assert store._known([name]) == []
