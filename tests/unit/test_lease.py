"""The lease on a batch: renewed only when the broker answers, and past it nothing is sent."""

import threading
from types import SimpleNamespace

import pytest
from sqlalchemy.exc import OperationalError

from outbox import clock
from outbox.relay.batch import Batch, Lease
from outbox.relay.stopping import Stopping

LEASE_S = 30
LEASES = {3: 7, 5: 8}


class Clock:
    """A clock that the test turns; what sleeps on it turns it too."""

    def __init__(self):
        self.now = 1000.0

    def __call__(self):
        return self.now

    def sleep(self, seconds):
        self.now += seconds


class Database:
    """Takes renewals; `held` is what it answers, or the error that it raises."""

    def __init__(self):
        self.renewed = []
        self.held = set(LEASES)

    def renew(self, leases):
        self.renewed.append(leases)
        if isinstance(self.held, Exception):
            raise self.held
        return self.held


@pytest.fixture
def time(monkeypatch):
    time = Clock()
    monkeypatch.setattr(clock, "seconds", time)
    monkeypatch.setattr("outbox.relay.stopping.time", SimpleNamespace(monotonic=time, sleep=time.sleep))
    return time


@pytest.fixture
def database():
    return Database()


@pytest.fixture
def stop():
    return threading.Event()


@pytest.fixture
def lease(time, database, stop):
    return Lease(Batch(LEASES, [], time.now), Stopping(stop, grace_s=20), lease_s=LEASE_S, renew=database.renew)


def test_past_the_lease_nothing_is_sent(lease, time):
    assert lease.may_send()
    time.now += LEASE_S - 0.001
    assert lease.may_send()
    time.now += 0.001
    assert not lease.may_send()


def test_the_lease_counts_from_before_the_claim(time, database, stop):
    batch = Batch(LEASES, [], claimed_at=time.now - LEASE_S)

    assert not Lease(batch, Stopping(stop, grace_s=20), lease_s=LEASE_S, renew=database.renew).may_send()


def test_asking_whether_to_send_or_wait_renews_nothing(lease, time, database):
    time.now += LEASE_S / 2
    lease.may_send()
    lease.may_wait()

    assert database.renewed == []


def test_progress_renews_once_when_a_third_of_the_lease_has_passed(lease, time, database):
    lease.progress()
    time.now += LEASE_S / 3 - 0.001
    lease.progress()
    assert database.renewed == []

    time.now += 0.001
    lease.progress()
    lease.progress()
    assert database.renewed == [LEASES]


def test_a_renewed_lease_lasts_from_the_renewal(lease, time):
    time.now += LEASE_S / 3
    lease.progress()
    time.now += LEASE_S - 0.001
    assert lease.may_send()
    time.now += 0.001
    assert not lease.may_send()


def test_steady_progress_keeps_the_lease_for_as_long_as_it_takes(lease, time, database):
    for _ in range(1000):
        time.now += 1
        lease.progress()
        assert lease.may_send()

    assert len(database.renewed) == 100


def test_one_lost_partition_stops_the_sending(lease, time, database):
    database.held = {3}
    time.now += LEASE_S / 3
    lease.progress()

    assert not lease.may_send()


def test_a_fenced_lease_does_not_come_back(lease, time, database):
    database.held = {3}
    time.now += LEASE_S / 3
    lease.progress()
    for _ in range(5):
        time.now += LEASE_S / 3
        lease.progress()
        assert not lease.may_send()


def test_a_database_that_is_away_leaves_the_rest_of_the_lease(lease, time, database):
    database.held = OperationalError("UPDATE", {}, Exception("server closed the connection"))
    time.now += LEASE_S / 3
    lease.progress()
    assert lease.may_send()

    time.now += LEASE_S * 2 / 3
    assert not lease.may_send()


def test_a_database_that_is_back_renews_what_is_left(lease, time, database):
    database.held = OperationalError("UPDATE", {}, Exception("server closed the connection"))
    time.now += LEASE_S / 3
    lease.progress()
    database.held = set(LEASES)
    time.now += LEASE_S / 3
    lease.progress()
    time.now += LEASE_S / 2

    assert lease.may_send()


def test_a_stop_ends_the_sending_at_once_and_the_waiting_after_the_grace(lease, time, stop):
    stop.set()

    assert not lease.may_send()
    assert lease.may_wait()
    time.now += 19.999
    assert lease.may_wait()
    time.now += 0.001
    assert not lease.may_wait()


def test_without_a_stop_waiting_has_no_end(lease, time):
    time.now += 10**6
    assert lease.may_wait()


def test_resting_goes_on_after_a_stop_as_far_as_the_grace_allows(time, stop):
    stopping = Stopping(stop, grace_s=20)
    stop.set()

    stopping.rest(15)
    assert time.now == 1015
    stopping.rest(15)
    assert time.now == 1020
    assert stopping.grace_over
    stopping.rest(15)
    assert time.now == 1020


def test_the_clock_never_steps_back():
    assert clock.seconds() <= clock.seconds()
