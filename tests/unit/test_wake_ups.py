"""What a relay hears: wake-ups end its wait, none is lost in a claim, a flood is held off, and an address belongs to one alone."""

import os
import random
import socket
import stat
import threading
import time
from contextlib import contextmanager

import pytest
import sqlalchemy as sa

from outbox import ConfigurationError, Event, enqueue, wake_relay
from outbox.points import Point
from outbox.policies import Policies
from outbox.publishers.flight import CONFIRMED
from outbox.publishers.memory import MemoryPublisher
from outbox.relay import Relay, Transactions
from outbox.relay.hearing import Datagrams
from outbox.relay.stopping import Stopping
from outbox.relay.wakeups import WakeUps, gap_s, waking
from outbox.settings import RelaySettings
from outbox.tables import DEFAULT
from outbox.testing.hooks import hooked
from outbox.wakeaddress import Udp, Unix, parse
from tests.rows import insert
from tests.servers.proc import free_port

PROMPTLY_S = 5.0
LONG_S = 60.0


@pytest.fixture(params=["udp", "unix"])
def address(request, tmp_path):
    return parse(f"udp://127.0.0.1:{free_port()}" if request.param == "udp" else f"unix://{tmp_path / 'relay.sock'}")


def send(address, *, times=1):
    family, where = address.resolve() if isinstance(address, Udp) else (socket.AF_UNIX, address.path)
    with socket.socket(family, socket.SOCK_DGRAM) as sender:
        for _ in range(times):
            sender.sendto(os.urandom(random.randrange(2000)), where)  # what is in it does not matter


@contextmanager
def relay_at_work(engine, address, publisher, *, poll_interval_s=LONG_S):
    """Run a relay in a thread until the block ends; give the event that stops it."""
    stop = threading.Event()
    transactions = Transactions(engine, DEFAULT, owner="relay", lease_s=30, batch_size=100, policies=Policies())
    with Datagrams(address) as source, WakeUps(source, stop) as wake_ups:
        stopping = Stopping(stop, grace_s=0, wake_ups=wake_ups)
        relay = Relay(transactions, publisher, stopping, lease_s=30, poll_interval_s=poll_interval_s)
        thread = threading.Thread(target=relay.run)
        thread.start()
        try:
            yield stop
        finally:
            began = time.monotonic()
            stop.set()
            thread.join()
            assert time.monotonic() - began < PROMPTLY_S, "the stop ends the wait"


class Polls:
    """Counts the polls of a relay, and tells when it has gone quiet: the next pause is the poll interval."""

    def __init__(self, monkeypatch):
        self.count = 0
        self.quiet = threading.Event()
        idle = Stopping.idle

        def note(stopping, timeout_s):
            self.count += 1
            if timeout_s > 0.25:
                self.quiet.set()
            return idle(stopping, timeout_s)

        monkeypatch.setattr(Stopping, "idle", note)

    def wait_until_quiet(self):
        self.quiet.clear()
        assert self.quiet.wait(30)


class Signals(MemoryPublisher):
    """Releases a semaphore at each message that it publishes."""

    def __init__(self):
        self.got = threading.Semaphore(0)
        super().__init__(self._note)

    def _note(self, _row):
        self.got.release()
        return CONFIRMED


@pytest.fixture
def polls(monkeypatch):
    return Polls(monkeypatch)


def test_a_commit_wakes_a_relay_that_would_have_slept_for_a_minute(engine, address, polls):
    publisher = Signals()
    wake_relay(engine, str(address))
    with relay_at_work(engine, address, publisher):
        for _ in range(3):
            polls.wait_until_quiet()
            with engine.begin() as connection:
                enqueue(connection, Event(topic="orders.placed", payload={}))
            assert publisher.got.acquire(timeout=PROMPTLY_S)


def test_a_lost_wake_up_costs_no_more_than_the_poll_interval(engine, address):
    publisher = Signals()
    with relay_at_work(engine, address, publisher, poll_interval_s=0.3):
        insert(engine, "a")  # nobody says so
        assert publisher.got.acquire(timeout=PROMPTLY_S)


def test_a_wake_up_during_a_claim_is_not_lost(engine, address, polls, monkeypatch):
    """It comes when the claim has seen what it will see, in the second of the two looks: the wait for a minute must end at once."""
    publisher, claims = Signals(), iter(())
    claim = Transactions.claim

    def claim_and_miss(transactions):
        found = claim(transactions)
        if next(claims, None) == "second":
            insert(engine, "late")
            send(address)
        return found

    monkeypatch.setattr(Transactions, "claim", claim_and_miss)
    with relay_at_work(engine, address, publisher):
        polls.wait_until_quiet()
        claims = iter(["first", "second"])
        send(address)
        assert publisher.got.acquire(timeout=PROMPTLY_S)


def test_a_wake_up_between_claim_and_settle_is_not_lost(engine, address, polls):
    publisher = Signals()

    def commit():
        insert(engine, "late")
        send(address)

    with hooked() as hooks, relay_at_work(engine, address, publisher):
        polls.wait_until_quiet()
        hooks.at(Point.AFTER_CLAIM, commit)
        insert(engine, "early")
        send(address)
        for _ in range(2):
            assert publisher.got.acquire(timeout=PROMPTLY_S)


def test_a_flood_makes_it_neither_busy_nor_deaf(engine, address, polls, monkeypatch):
    """Two seconds of datagrams as fast as they go: polls are bounded, and a message among them goes out."""
    publisher = Signals()
    with relay_at_work(engine, address, publisher):
        polls.wait_until_quiet()
        before, began, found = polls.count, time.monotonic(), False
        with statements(engine) as executed:
            while time.monotonic() - began < 2:
                send_if_there_is_room(address)
                if not found and time.monotonic() - began > 1:
                    insert(engine, "a")
                    found = publisher.got.acquire(timeout=PROMPTLY_S)
        took_s = time.monotonic() - began

    assert found
    assert polls.count - before <= 16 * took_s + 15, "16 a second, and the quick ones at its beginning and after the message"
    assert len(executed) <= 6 * (polls.count - before) + 30


def send_if_there_is_room(address):
    family, where = address.resolve() if isinstance(address, Udp) else (socket.AF_UNIX, address.path)
    with socket.socket(family, socket.SOCK_DGRAM) as sender:
        sender.setblocking(False)
        for _ in range(100):
            try:
                sender.sendto(b"?", where)
            except BlockingIOError:
                return


@contextmanager
def statements(engine):
    executed = []

    def note(_connection, _cursor, statement, *_):
        executed.append(statement)

    sa.event.listen(engine, "before_cursor_execute", note)
    yield executed
    sa.event.remove(engine, "before_cursor_execute", note)


def test_the_gaps_between_wake_ups_that_bring_nothing_grow_and_have_an_end():
    gaps = [gap_s(fruitless) for fruitless in range(12)]

    assert gaps[0] == 0.002, "one after which there was something to do delays the next by no more"
    assert gaps == sorted(gaps)
    assert gaps[-1] == gap_s(10**9) == 0.064


class Readable:
    """A source that is always ready."""

    def __init__(self):
        self.pair = socket.socketpair()
        self.pair[1].send(b"x")

    def fileno(self):
        return self.pair[0].fileno()

    def clear(self):
        pass

    def close(self):
        for end in self.pair:
            end.close()


class Held(threading.Event):
    """A stop that is only waited for in a test's own time."""

    def __init__(self, now):
        super().__init__()
        self.now, self.held = now, []

    def wait(self, timeout=None):
        if threading.current_thread().name == "outbox-stop":
            return super().wait(timeout)
        self.now[0] += timeout
        self.held.append(timeout)
        return False


def test_wake_ups_in_a_row_are_held_off_and_one_after_a_while_is_not():
    now = [100.0]
    stop, source = Held(now), Readable()
    with WakeUps(source, stop, seconds=lambda: now[0]) as wake_ups:
        assert [wake_ups.wait(60) for _ in range(4)] == [True] * 4
        assert stop.held == pytest.approx([0.004, 0.008, 0.016])
        wake_ups.fruitful()
        assert wake_ups.wait(60)
        assert stop.held[3:] == pytest.approx([0.002])
        now[0] += 1
        assert wake_ups.wait(60)
        assert len(stop.held) == 4
        assert wake_ups.wait(0.001), "the wait ends in time, and what has come by then counts"
        assert stop.held[4:] == pytest.approx([0.001])
    source.close()


def test_after_a_wake_up_that_brought_nothing_it_looks_once_more():
    now = [100.0]
    stop, source = Held(now), Once()
    with WakeUps(source, stop, seconds=lambda: now[0]) as wake_ups:
        assert wake_ups.wait(60)
        source.clear()
        began = time.monotonic()
        assert wake_ups.wait(60)
        assert time.monotonic() - began < PROMPTLY_S
        assert not wake_ups.wait(0.01)
    source.close()


class Once(Readable):
    """A source that can be cleared."""

    def clear(self):
        self.pair[0].recv(1)


def test_what_has_come_before_the_look_is_forgotten(address):
    with Datagrams(address) as source, WakeUps(source, threading.Event()) as wake_ups:
        send(address, times=5)
        wake_ups.clear()
        assert not wake_ups.wait(0)
        send(address)
        assert wake_ups.wait(60)


def test_a_wait_ends_when_it_is_time_to_stop(address):
    stop = threading.Event()
    with Datagrams(address) as source, WakeUps(source, stop) as wake_ups:
        threading.Timer(0.05, stop.set).start()
        began = time.monotonic()
        assert not wake_ups.wait(LONG_S)
        assert time.monotonic() - began < PROMPTLY_S


def test_a_wake_up_does_not_cut_the_pauses_of_an_outage_short(engine, address):
    """Or a busy application would make its relay hammer a broker that is on its knees."""
    from outbox.errors import BrokerUnavailable

    class Away(MemoryPublisher):
        tries = 0

        def connect(self):
            self.tries += 1
            raise BrokerUnavailable("no")

    publisher = Away()
    with relay_at_work(engine, address, publisher):
        began = time.monotonic()
        while time.monotonic() - began < 1:
            send_if_there_is_room(address)

    assert publisher.tries <= 8


def test_in_a_long_pause_the_connection_to_the_broker_is_looked_after(engine, monkeypatch):
    class Counts(MemoryPublisher):
        ticks = connects = 0

        def connect(self):
            self.connects += 1

        def tick(self):
            self.ticks += 1

    class Never(Stopping):
        waited_s = 0.0

        def wait(self, timeout_s):
            self.waited_s += timeout_s
            if self.waited_s > 600:
                self._event.set()

    publisher, stopping = Counts(), Never(threading.Event(), grace_s=0)
    transactions = Transactions(engine, DEFAULT, owner="relay", lease_s=30, batch_size=100, policies=Policies())
    Relay(transactions, publisher, stopping, lease_s=30, poll_interval_s=LONG_S).run()

    assert publisher.ticks >= 600 / 5
    assert publisher.connects < 40, "polls are as rare as they are meant to be"


# The address


@pytest.mark.parametrize(
    "text", ["udp://127.0.0.1:7411", "udp://[::1]:7411", "udp://relay.local:1", "unix:///run/a.sock", "postgres"]
)
def test_an_address_is_written_as_it_is_read(text):
    assert str(parse(text)) == text


def test_an_address_that_another_relay_has_is_refused(address):
    with (
        Datagrams(address),
        pytest.raises(ConfigurationError, match="each relay needs an address of its own"),
        Datagrams(address),
    ):
        pass


def test_an_address_is_free_again_after_its_relay(address):
    for _ in range(3):
        with Datagrams(address):
            send(address)
    if isinstance(address, Unix):
        assert not os.path.lexists(address.path)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "relay.sock"


def test_the_socket_that_a_killed_relay_left_is_taken_over(path):
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as killed:
        killed.bind(str(path))
    with Datagrams(Unix(str(path))) as source, WakeUps(source, threading.Event()) as wake_ups:
        send(Unix(str(path)))
        assert wake_ups.wait(LONG_S)


def test_of_many_that_find_the_same_leftover_one_gets_it(path):
    for _ in range(10):
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as killed:
            killed.bind(str(path))
        barrier, got, refused, done = threading.Barrier(5), [], [], threading.Event()

        def take(barrier=barrier, got=got, refused=refused, done=done):
            barrier.wait()
            try:
                with Datagrams(Unix(str(path))):
                    got.append(path.stat().st_ino)
                    done.wait(10)
                    assert path.stat().st_ino == got[0]
            except ConfigurationError as error:
                refused.append(error)
            if len(refused) == 4:
                done.set()

        threads = [threading.Thread(target=take) for _ in range(5)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert (len(got), len(refused)) == (1, 4)


@pytest.mark.parametrize("kind", [socket.SOCK_DGRAM, socket.SOCK_STREAM])
def test_the_socket_of_another_program_that_is_alive_is_left_alone(path, kind):
    with socket.socket(socket.AF_UNIX, kind) as other:
        other.bind(str(path))
        if kind == socket.SOCK_STREAM:
            other.listen()
        with pytest.raises(ConfigurationError, match="cannot listen on unix:"), Datagrams(Unix(str(path))):
            pass
        assert path.is_socket()


def test_a_file_that_is_no_socket_is_left_alone(path):
    path.write_text("mine")
    with pytest.raises(ConfigurationError, match="there is a file that is no socket"), Datagrams(Unix(str(path))):
        pass
    assert path.read_text() == "mine"


def test_a_folder_that_is_not_there_is_said(tmp_path):
    with pytest.raises(ConfigurationError, match="No such file or directory"), Datagrams(Unix(str(tmp_path / "no" / "r.sock"))):
        pass


def test_who_may_enter_the_folder_may_wake_the_relay(path):
    before = os.umask(0o077)
    try:
        with Datagrams(Unix(str(path))):
            assert stat.S_IMODE(path.stat().st_mode) == 0o666
            assert stat.S_IMODE(path.with_name("relay.sock.lock").stat().st_mode) == 0o600
    finally:
        os.umask(before)


# The settings

URLS = {"database_url": "sqlite://", "broker_url": "memory://"}


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        ({"wake": "localhost"}, "is no address"),
        ({"wake_database_url": "postgresql://db/shop"}, "only for wake = postgres"),
        ({"wake": "udp://127.0.0.1:7411", "wake_database_url": "postgresql://db/shop"}, "only for wake = postgres"),
    ],
)
def test_settings_that_cannot_work_are_refused(given, problem):
    with pytest.raises(ConfigurationError, match=problem):
        RelaySettings(**URLS | given)


def test_to_listen_takes_postgresql():
    with (
        pytest.raises(ConfigurationError, match="needs a PostgreSQL database, not 'sqlite'"),
        waking(RelaySettings(**URLS, wake="postgres"), threading.Event()),
    ):
        pass


def test_without_an_address_nothing_is_heard():
    with waking(RelaySettings(**URLS), threading.Event()) as wake_ups:
        assert wake_ups is None
