"""Health over HTTP, with vitals and clocks of the test's own; a plain client asks."""

import importlib
import json
import logging
import os
import socket
import threading
import time
import urllib.request
from contextlib import ExitStack, contextmanager, suppress
from urllib.error import HTTPError

import pytest
from click.testing import CliRunner

from outbox.cli import main
from outbox.errors import ConfigurationError
from outbox.http import server
from outbox.http.health import answering
from outbox.http.readiness import Readiness
from outbox.progress import Progress
from outbox.systemd import notifying
from outbox.vitals import Vitals
from tests.unit.test_progress import Clock

ANY = ("127.0.0.1", 0)


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def vitals(clock):
    return Vitals(limit_s=10, progress=Progress(seconds=clock))


@pytest.fixture
def address(vitals):
    with answering(ANY, vitals) as address:
        yield address


def get(address, target, **headers):
    """Return status, content type and body."""
    request = urllib.request.Request(f"http://{address[0]}:{address[1]}{target}", headers=headers)
    try:
        with urllib.request.urlopen(request, timeout=10) as response:
            return response.status, response.headers["Content-Type"], response.read().decode()
    except HTTPError as error:
        with error:
            return error.code, error.headers["Content-Type"], error.read().decode()


def test_livez_turns_red_over_the_limit_says_what_hangs_and_turns_green_again(address, vitals, clock):
    vitals.progress.note("publishing")
    clock.now += 10
    assert get(address, "/livez") == (200, "text/plain; charset=utf-8", "alive\n")

    clock.now += 2.5
    status, _, body = get(address, "/livez")
    assert status == 503
    assert body.startswith("hung: no progress for 12.5 s while publishing (limit 10 s), since 20")
    assert body.count("\n") == 1

    vitals.progress.note()
    assert get(address, "/livez")[0] == 200


def test_json_comes_by_accept_or_by_query(address, vitals, clock):
    vitals.progress.note("publishing")
    for found in (get(address, "/livez", Accept="application/json"), get(address, "/livez?json")):
        assert (found[0], found[1]) == (200, "application/json")
        assert json.loads(found[2]) == {"status": "alive", "doing": "publishing", "age_s": 0}
    clock.now += 11
    status, _, body = get(address, "/livez?json")
    found = json.loads(body)
    assert (status, found["status"], found["doing"], found["for_s"], found["limit_s"]) == (503, "hung", "publishing", 11, 10)


def test_startupz_is_green_after_the_first_success(address, vitals):
    assert get(address, "/startupz")[0] == 503
    vitals.started.set()
    assert get(address, "/startupz") == (200, "text/plain; charset=utf-8", "started\n")


def test_readyz_tells_what_the_check_found_and_degrades_for_other_troubles(vitals):
    problems = []

    def check():
        if problems:
            raise ConfigurationError(problems[-1])

    with answering(ANY, vitals, check=check) as address:
        assert get(address, "/readyz") == (200, "text/plain; charset=utf-8", "ready\n")
        vitals.trouble("broker", "unreachable")
        assert get(address, "/readyz") == (200, "text/plain; charset=utf-8", "degraded: broker unreachable\n")
        assert json.loads(get(address, "/readyz?json")[2])["broker"] == "unreachable"
        problems.append("database: gone\n  for good\n\ntry this")
        until(lambda: get(address, "/readyz")[0] == 503)
        assert get(address, "/readyz")[2] == "not ready: database: gone for good\n"


def until(condition, *, timeout_s=20):
    deadline = time.monotonic() + timeout_s
    pause = threading.Event()
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        pause.wait(0.02)


def test_livez_and_startupz_ask_the_check_nothing(vitals):
    asked = []
    with answering(ANY, vitals, check=lambda: asked.append(1)) as address:
        get(address, "/livez")
        get(address, "/startupz")
    assert asked == []


@pytest.mark.parametrize("target", ["/", "/live", "/livez/x", "/readyz%00"])
def test_anything_else_is_not_found(address, target):
    assert get(address, target)[0] == 404


def test_other_methods_are_refused_and_head_is_answered_without_a_body(address):
    assert talk(address, b"POST /livez HTTP/1.0\r\n\r\n").startswith(b"HTTP/1.0 501")
    head = talk(address, b"HEAD /livez HTTP/1.0\r\n\r\n")
    assert head.startswith(b"HTTP/1.0 200")
    assert head.endswith(b"\r\n\r\n")


def talk(address, request):
    with socket.create_connection(address, timeout=10) as client:
        client.sendall(request)
        client.shutdown(socket.SHUT_WR)
        return b"".join(iter(lambda: client.recv(65536), b""))


# The check


def test_however_many_ask_the_check_runs_once_at_a_time_and_its_answer_is_kept_for_a_second():
    clock, runs, go = Clock(), [], threading.Event()

    def check():
        runs.append(1)
        go.wait(10)

    readiness = Readiness(check, seconds=clock)
    found = []
    threads = [threading.Thread(target=lambda: found.append(readiness.problem())) for _ in range(20)]
    for thread in threads:
        thread.start()
    until(lambda: runs)
    go.set()
    for thread in threads:
        thread.join()
    assert (found, runs) == ([None] * 20, [1])
    clock.now += 0.999
    readiness.problem()
    assert runs == [1]
    clock.now += 0.001
    readiness.problem()
    assert runs == [1, 1]


def test_a_check_that_hangs_is_waited_for_once_and_not_started_again():
    runs, go = [], threading.Event()

    def check():
        runs.append(1)
        go.wait(20)

    readiness = Readiness(check, limit_s=0.2)
    began = time.monotonic()
    assert readiness.problem().startswith("no answer for 0.2")
    took_s = time.monotonic() - began
    for _ in range(100):
        assert readiness.problem().startswith("no answer for ")
    assert 0.2 <= took_s < 2
    assert time.monotonic() - began < took_s + 1
    assert runs == [1]
    go.set()
    until(lambda: readiness.problem() is None)


# Clients


@contextmanager
def clients(address, count, said=b"GET /livez HTTP/1.0\r\nX: "):
    """So many that say something, and then no more."""
    with ExitStack() as stack:
        yield [stack.enter_context(slow(address, said)) for _ in range(count)]


@contextmanager
def slow(address, said):
    with socket.create_connection(address, timeout=10) as client:
        client.sendall(said)
        yield client


def threads_of_requests():
    return [thread for thread in threading.enumerate() if thread.name == "outbox-http"]


def test_clients_that_never_finish_keep_no_probe_waiting_and_take_few_threads(address):
    with clients(address, 50):
        for _ in range(5):
            began = time.monotonic()
            assert get(address, "/livez")[0] == 200
            assert time.monotonic() - began < 2
            assert len(threads_of_requests()) <= server.MOST_AT_ONCE


def test_a_client_that_trickles_is_dropped_in_the_end(address, monkeypatch):
    monkeypatch.setattr(server, "REQUEST_LIMIT_S", 0.5)
    with clients(address, 1) as (client,), suppress(OSError):
        deadline = time.monotonic() + 10
        client.settimeout(0.05)
        while time.monotonic() < deadline:
            client.sendall(b"x")
            with suppress(TimeoutError):
                assert client.recv(100) == b"", "it was hung up on"
                break
        else:
            pytest.fail("it was never dropped")
    until(lambda: not threads_of_requests())


@pytest.mark.parametrize(
    "said",
    [
        b"",
        b"\x00\xff\n",
        b"GET\r\n\r\n",
        b"GET / HTTP/9.9\r\n\r\n",
        b"GET /" + b"x" * 100_000,
        b"GET http://[ HTTP/1.0\r\n\r\n",
        b"A: b\r\n" * 500,
    ],
)
def test_what_is_no_request_does_no_harm(address, said):
    with suppress(OSError):
        talk(address, said)
    assert get(address, "/livez")[0] == 200


def test_it_stops_at_once_whoever_is_connected_and_leaves_no_thread_and_no_port(vitals):
    with ExitStack() as stack:
        with answering(ANY, vitals) as address:
            stack.enter_context(clients(address, 5))
            get(address, "/livez")
            began = time.monotonic()
        assert time.monotonic() - began < 2
        assert threads_of_requests() == []
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(address, timeout=5)


def test_port_0_is_any_and_the_log_says_which(vitals, caplog):
    with caplog.at_level(logging.INFO, logger="outbox.http"), answering(ANY, vitals) as address:
        (record,) = caplog.records
    assert (record.message, record.host, record.port) == ("listening", *address)
    assert address[1] > 0


def test_without_an_address_nothing_listens(vitals):
    with answering(None, vitals) as address:
        assert address is None


# The option


@pytest.mark.parametrize(
    ("written", "means"),
    [
        ("8080", ("127.0.0.1", 8080)),
        ("0.0.0.0:8080", ("0.0.0.0", 8080)),
        ("[::1]:0", ("::1", 0)),
        ("localhost:1", ("localhost", 1)),
    ],
)
def test_an_address_is_host_and_port_or_a_port_of_this_host(written, means):
    from outbox.cli.types import ADDRESS

    assert ADDRESS.convert(written, None, None) == means


@pytest.mark.parametrize("written", [":8080", "host", "host:", "::1:80", "127.0.0.1:65536", "[::1]", "", "a b:1"])
def test_anything_else_is_a_usage_error(written, tmp_path):
    done = run("--health", written, tmp_path=tmp_path)
    assert done.exit_code == 2
    assert "is no address; write e.g. 127.0.0.1:8080" in done.stderr


def run(*options, tmp_path):
    urls = ("--database-url", f"sqlite:///{tmp_path / 'outbox.db'}", "--broker-url", "memory://")
    return CliRunner().invoke(main, ["run", *urls, *options])


def test_a_port_in_use_is_a_configuration_error_by_flag_environment_or_file(tmp_path, monkeypatch):
    module = importlib.import_module("outbox.cli.run")  # the package has a command of that name
    monkeypatch.setattr(module, "stop_on_signals", threading.Event)
    monkeypatch.setattr(module.logs, "setup", lambda *_, **__: None)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        (tmp_path / "relay.toml").write_text(f"health = {port}\n")
        by_flag = run("--health", f"127.0.0.1:{port}", tmp_path=tmp_path)
        by_file = run("--config", str(tmp_path / "relay.toml"), tmp_path=tmp_path)
        monkeypatch.setenv("OUTBOX_HEALTH", str(port))
        by_environment = run(tmp_path=tmp_path)
    for done in (by_flag, by_file, by_environment):
        assert done.exit_code == 2, done.output
        assert done.stderr.startswith(f"Error: health: cannot listen on 127.0.0.1:{port}: Address already in use")


# systemd


@pytest.fixture
def systemd(tmp_path, monkeypatch):
    """The socket that systemd listens on."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listener:
        listener.bind(str(tmp_path / "notify"))
        listener.settimeout(10)
        monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "notify"))
        yield listener


def test_systemd_hears_ready_then_the_watchdog_only_while_alive_then_stopping(systemd, vitals, clock, monkeypatch):
    monkeypatch.setenv("WATCHDOG_USEC", "100000")
    stop = threading.Event()
    with notifying(vitals, stop):
        vitals.at_work.set()
        assert systemd.recv(100) == b"READY=1"
        assert systemd.recv(100) == b"WATCHDOG=1"

        clock.now += 11
        systemd.settimeout(0.5)
        silent_by = time.monotonic() + 5
        with suppress(TimeoutError):  # at the latest after what was sent before
            while True:
                assert systemd.recv(100) == b"WATCHDOG=1"
                assert time.monotonic() < silent_by
        systemd.settimeout(10)
        vitals.progress.note()
        assert systemd.recv(100) == b"WATCHDOG=1"

        stop.set()
        while (said := systemd.recv(100)) == b"WATCHDOG=1":
            pass
        assert said == b"STOPPING=1"


def test_without_a_watchdog_systemd_hears_only_the_beginning_and_the_end(systemd, vitals, monkeypatch):
    monkeypatch.setenv("WATCHDOG_USEC", "1000")
    monkeypatch.setenv("WATCHDOG_PID", str(os.getpid() + 1))  # meant for another process
    vitals.at_work.set()
    with notifying(vitals, threading.Event()):
        assert systemd.recv(100) == b"READY=1"
    assert systemd.recv(100) == b"STOPPING=1"


def test_a_process_that_ends_before_it_was_at_work_was_never_ready(systemd, vitals):
    with notifying(vitals, threading.Event()):
        pass
    assert systemd.recv(100) == b"STOPPING=1"


def test_an_abstract_socket_and_one_that_nobody_listens_on(vitals, monkeypatch):
    vitals.at_work.set()
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listener:
        listener.bind(f"\0outbox-test-{os.getpid()}")
        listener.settimeout(10)
        monkeypatch.setenv("NOTIFY_SOCKET", f"@outbox-test-{os.getpid()}")
        with notifying(vitals, threading.Event()):
            assert listener.recv(100) == b"READY=1"
    with notifying(vitals, threading.Event()):
        pass


def test_without_systemd_nothing_is_said_and_nothing_is_stopped(vitals, monkeypatch):
    monkeypatch.delenv("NOTIFY_SOCKET", raising=False)
    stop = threading.Event()
    with notifying(vitals, stop):
        pass
    assert not stop.is_set()
