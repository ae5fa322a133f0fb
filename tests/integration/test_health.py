"""A relay as a real process hangs, or meets an outage: what /livez and /readyz say, and who publishes meanwhile."""

import os
import signal
import socket
import threading
import urllib.request
from contextlib import contextmanager
from functools import partial
from urllib.error import HTTPError

import pytest

from tests.faults import processes
from tests.faults.observer import Observer
from tests.faults.proxy import Proxy
from tests.integration.consuming import until
from tests.integration.test_rabbitmq_publisher import with_url
from tests.integration.test_suspects import left
from tests.rows import database, insert
from tests.servers.proc import free_port

LEASE_S = 5.5
SOON = ("--lease", f"{LEASE_S}s", "--confirm-timeout", "500ms", "--health", "127.0.0.1:0")


@contextmanager
def relay(name, database_url, broker_url, *options):
    """A relay with a short lease, at work; gives what asks it, and its program."""
    with processes.relay(name, database_url, broker_url, *SOON, *options) as program:
        program.wait_until_ready()
        yield partial(ask, port_of(program)), program


def port_of(program):
    """The port that the log names."""
    program.wait_for_log("listening")
    (line,) = [line for line in program.log.splitlines() if " listening " in line]
    return int(line.rpartition("port=")[2])


def ask(port, path):
    """Return the status and the body; 0 when nobody answers within three seconds."""
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=3) as response:
            return response.status, response.read().decode()
    except HTTPError as error:
        with error:
            return error.code, error.read().decode()
    except (TimeoutError, OSError):
        return 0, ""


def wait(seconds):
    threading.Event().wait(seconds)


def all_sent(engine, message_ids):
    return not left(engine) & set(message_ids)


@pytest.fixture
def observer(vhost_url):
    return Observer(vhost_url)


def test_a_write_that_stalls_turns_livez_red_another_relay_takes_over_and_after_the_stall_it_is_green(
    database_url, vhost_url, engine, observer
):
    with Proxy(vhost_url) as proxy, relay("one", database_url, proxy.url) as (one, first):
        until(lambda: one("/startupz")[0] == 200)
        assert one("/livez")[0] == 200
        proxy.stall()
        sent = insert(engine, *"abc", payload=b"x" * 15_000_000)  # more than all the buffers on the way take
        until(lambda: one("/livez")[0] == 503)
        status, body = one("/livez")
        assert status == 503
        assert "while publishing to the broker (limit 5.5 s), since 20" in body
        with relay("two", database_url, vhost_url) as (two, _):
            until(partial(all_sent, engine, sent))
            assert two("/livez")[0] == 200
            assert one("/livez")[0] == 503
        proxy.resume()
        until(lambda: one("/livez")[0] == 200)
        more = insert(engine, *"abc")
        until(partial(all_sent, engine, more))
        assert first.terminate() == 0
    arrived = [message.properties["message_id"] for message in observer.received()]
    assert set(arrived) == {str(each) for each in sent + more}


def test_a_database_that_does_not_answer_turns_livez_red_and_readyz_too_and_another_relay_takes_over(
    database_url, vhost_url, engine, observer
):
    with Proxy(database_url) as proxy, relay("one", proxy.url, vhost_url) as (one, first):
        until(lambda: one("/startupz")[0] == 200)
        until(lambda: one("/readyz") == (200, "ready\n"))
        proxy.stall()
        sent = insert(engine, *"abcdefgh")
        until(lambda: one("/livez")[0] == 503)
        assert "database" in one("/livez")[1]
        assert one("/readyz")[0] == 503
        assert "no answer for" in one("/readyz")[1]
        with relay("two", database_url, vhost_url):
            until(partial(all_sent, engine, sent))
        proxy.resume()
        until(lambda: (one("/livez")[0], one("/readyz")[0]) == (200, 200))
        assert first.terminate() == 0
    assert len(observer.received()) >= 8


@pytest.mark.timeout(240)
def test_an_outage_is_no_hang(own_postgres, vhost_url):
    """Of a broker that is away, and of a database that was stopped: each for longer than the lease."""
    own_url = own_postgres.create_database()
    engine = database(own_url)
    nowhere = with_url(vhost_url, port=free_port())
    with relay("one", own_url, nowhere) as (one, first), relay("two", own_url, vhost_url) as (two, second):
        until(lambda: two("/startupz")[0] == 200)
        engine.dispose()
        own_postgres.stop()
        try:
            assert one("/startupz")[0] == 503
            until(lambda: two("/readyz")[0] == 503)
            for _ in range(int(LEASE_S) + 2):
                wait(1)
                assert (one("/livez")[0], two("/livez")[0]) == (200, 200)
            status, body = two("/readyz")
            assert (status, body.startswith("not ready: database: ")) == (503, True)
        finally:
            own_postgres.start()
        until(lambda: two("/readyz") == (200, "ready\n"))
        until(lambda: one("/readyz") == (200, "degraded: broker unreachable\n"))
        assert (first.terminate(), second.terminate()) == (0, 0)
    own_postgres.drop_database(own_url)


@pytest.mark.matrix
def test_under_a_memory_alarm_livez_stays_green_and_readyz_is_degraded(database_url, own_rabbitmq, engine):
    url = own_rabbitmq.create_vhost()
    Observer(url)
    with relay("one", database_url, url) as (one, program):
        until(lambda: one("/startupz")[0] == 200)
        own_rabbitmq.ctl("set_vm_memory_high_watermark", "0.00001")
        try:
            sent = insert(engine, *"abcdefgh" * 20)
            until(lambda: one("/readyz") == (200, "degraded: broker blocked\n"))
            for _ in range(int(LEASE_S) + 2):
                wait(1)
                assert one("/livez")[0] == 200
        finally:
            own_rabbitmq.ctl("set_vm_memory_high_watermark", "0.4")
        until(partial(all_sent, engine, sent))
        until(lambda: one("/readyz") == (200, "ready\n"))
        assert program.terminate() == 0
    own_rabbitmq.drop_vhost(url)


@pytest.mark.matrix
def test_a_relay_that_was_stopped_answers_nobody_then_is_alive_again(database_url, vhost_url, engine, observer):
    with relay("one", database_url, vhost_url) as (one, program):
        until(lambda: one("/startupz")[0] == 200)
        os.kill(program.process.pid, signal.SIGSTOP)
        assert one("/livez")[0] == 0
        sent = insert(engine, *"abcd")
        with relay("two", database_url, vhost_url):
            until(partial(all_sent, engine, sent))
            wait(LEASE_S)
        os.kill(program.process.pid, signal.SIGCONT)
        until(lambda: one("/livez")[0] == 200)
        more = insert(engine, *"abcd")
        until(partial(all_sent, engine, more))
        assert program.terminate() == 0


@pytest.mark.matrix
def test_the_schema_is_part_of_being_ready(database_url, vhost_url, engine):
    with relay("one", database_url, vhost_url) as (one, _program):
        until(lambda: one("/readyz")[0] == 200)
        with engine.begin() as connection:
            connection.exec_driver_sql("ALTER TABLE outbox_message RENAME TO elsewhere")
        until(lambda: one("/readyz")[0] == 503)
        assert "outbox_message" in one("/readyz")[1]
        assert one("/livez")[0] == 200


def test_systemd_hears_of_a_relay(database_url, vhost_url, engine, tmp_path):
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as systemd:
        systemd.bind(str(tmp_path / "notify"))
        systemd.settimeout(30)
        program = processes.relay("one", database_url, vhost_url)
        program._environment |= {"NOTIFY_SOCKET": str(tmp_path / "notify"), "WATCHDOG_USEC": "400000"}
        with program:
            assert systemd.recv(100) == b"READY=1"
            assert systemd.recv(100) == b"WATCHDOG=1"
            program.process.send_signal(signal.SIGTERM)
            while (said := systemd.recv(100)) == b"WATCHDOG=1":
                pass
            assert said == b"STOPPING=1"
            assert program.process.wait(30) == 0
