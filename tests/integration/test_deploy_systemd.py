"""The unit of examples/deploy under a real systemd: what it makes of a start, a stop, a hang, and of each exit code."""

import shutil
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from tests.faults.observer import Observer
from tests.integration.consuming import until
from tests.integration.test_rabbitmq_publisher import with_url
from tests.integration.test_suspects import left
from tests.rows import database, insert
from tests.servers import systemd
from tests.servers.proc import free_port
from tests.story import ROOT

UNIT = "outbox-relay.service"
FOLDER = ROOT / "examples/deploy/systemd"
# A user manager makes no users, and the program may be in /root or /tmp here. Everything else is the example's.
HERE = """
[Service]
DynamicUser=no
ProtectHome=no
PrivateTmp=no
EnvironmentFile=
EnvironmentFile={folder}/relay.env
ExecStart=
ExecStart="{program}" run {options}
RestartSec=200ms
"""


@pytest.fixture(scope="module")
def manager():
    if reason := systemd.unavailable():
        pytest.skip(reason)
    with systemd.Systemd() as server:
        yield server


@pytest.fixture
def install(manager):
    """Install the unit, pointed at our servers."""

    def install(database_url, broker_url, *options, more=""):
        shutil.copy(FOLDER / UNIT, manager.units)
        settings = (FOLDER / "relay.env").read_text() + f"\nOUTBOX_DATABASE_URL={database_url}\nOUTBOX_BROKER_URL={broker_url}\n"
        (manager.folder / "relay.env").write_text(settings)
        here = manager.units / f"{UNIT}.d/here.conf"
        here.parent.mkdir(exist_ok=True)
        program = Path(sys.executable).parent / "outbox-relay"
        here.write_text(HERE.format(folder=manager.folder, program=program, options=" ".join(options)) + more)
        manager.systemctl("daemon-reload")

    yield install
    manager.systemctl("stop", UNIT)
    manager.systemctl("reset-failed")


def state(manager):
    return manager.shows(UNIT, "ActiveState", "SubState", "Result", "ExecMainStatus")


def restarts(manager):
    return int(manager.shows(UNIT, "NRestarts")[0])


def test_start_returns_when_the_relay_is_at_work_and_stop_when_it_has_ended_in_order(
    manager, install, database_url, vhost_url, engine
):
    install(database_url, vhost_url)
    manager.systemctl("start", UNIT)
    assert state(manager)[:3] == ("active", "running", "success")
    (pid,) = manager.shows(UNIT, "MainPID")
    status = Path(f"/proc/{pid}/status").read_text()
    assert ("NoNewPrivs:\t1" in status, "Seccomp:\t2" in status, "CapEff:\t0000000000000000" in status) == (True, True, True)
    observer = Observer(vhost_url)
    sent = insert(engine, *"abc")
    until(lambda: not left(engine) & set(sent))
    assert len(observer.received()) == 3
    manager.systemctl("stop", UNIT)
    assert state(manager) == ("inactive", "dead", "success", "0")


def test_a_relay_that_hangs_is_killed_by_the_watchdog_and_started_again(manager, install, database_url, vhost_url, engine):
    install(database_url, vhost_url, more="WatchdogSec=1\n")
    manager.systemctl("start", UNIT)
    (pid,) = manager.shows(UNIT, "MainPID")
    manager.systemctl("kill", "--signal=STOP", UNIT)
    until(lambda: restarts(manager) == 1 and state(manager)[0] == "active")
    assert manager.shows(UNIT, "MainPID") != (pid,)


def ends(manager, code):
    """Start it, and wait until it has ended with the code."""
    with suppress(subprocess.CalledProcessError):  # some say READY before the broker has refused them
        manager.systemctl("start", UNIT)
    until(lambda: state(manager)[3] == str(code))


def test_a_wrong_option_is_not_tried_again(manager, install, database_url, vhost_url, engine):
    install(database_url, vhost_url, "--lease 10s --confirm-timeout 10s")
    ends(manager, 2)
    assert state(manager) == ("failed", "failed", "exit-code", "2")
    assert restarts(manager) == 0


@pytest.mark.parametrize("code", [pytest.param(3, marks=pytest.mark.matrix), pytest.param(4, marks=pytest.mark.matrix), 5])
def test_what_heals_by_itself_is_tried_again(manager, install, database_url, vhost_url, code):
    if code == 4:
        database(database_url).dispose()
    install(
        with_url(database_url, port=free_port()) if code == 3 else database_url,
        with_url(vhost_url, password="wrong") if code == 4 else vhost_url,
    )
    ends(manager, code)
    until(lambda: restarts(manager) >= 1)
