"""The demo as a user runs it: the real command, with its processes, its kills and its exit codes."""

import json
import os
import select
import shutil
import signal
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest
from sqlalchemy.orm import Session

import outbox
from outbox.demo.folder import Folder
from outbox.demo.ledger import count
from outbox.demo.report import DemoFailed, judge
from outbox.demo.run import Ended
from outbox.demo.tables import open_database

DEMO = [sys.executable, "-m", "outbox", "demo"]


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*DEMO, *arguments], capture_output=True, text=True, timeout=110, check=False)


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, subprocess.CompletedProcess[str]]:
    folder = tmp_path_factory.mktemp("demo")
    return folder, run("--orders", "250", "--kills", "2", "--json", "--folder", str(folder), "--timeout", "100s")


@pytest.fixture
def copy(ended: tuple[Path, subprocess.CompletedProcess[str]], tmp_path: Path) -> Folder:
    return Folder(Path(shutil.copytree(ended[0], tmp_path / "copy")))


def execute(database: Path, statement: str) -> None:
    connection = sqlite3.connect(database)
    with connection:
        assert connection.execute(statement).rowcount == 1
    connection.close()


def test_the_ledger_balances_although_the_relay_was_killed(ended: tuple[Path, subprocess.CompletedProcess[str]]) -> None:
    _, process = ended
    assert process.returncode == 0, process.stderr
    ledger = json.loads(process.stdout)
    assert ledger["orders_committed"] + ledger["orders_rolled_back"] == 250
    assert ledger["orders_rolled_back"] > 0
    assert ledger["shipped"] == ledger["orders_committed"]
    assert ledger["published_more_than_once"] >= 1
    assert ledger["duplicates_dropped"] >= ledger["published_more_than_once"]
    assert (
        ledger["lost"] == ledger["shipped_twice"] == ledger["shipped_although_rolled_back"] == ledger["left_in_the_outbox"] == 0
    )
    assert process.stderr.count("relay killed with SIGKILL") >= 2


def test_a_folder_with_a_demo_in_it_is_refused(ended: tuple[Path, subprocess.CompletedProcess[str]]) -> None:
    folder, _ = ended
    process = run("--folder", str(folder))
    assert process.returncode == 2
    assert "has a demo in it already" in process.stderr


def test_the_untouched_tables_pass(copy: Folder) -> None:
    judge(count(copy), Ended(kills=2, left=None))


@pytest.mark.parametrize(
    ("tamper", "wrong"),
    [
        ("DELETE FROM shipments WHERE id = 1", "lost"),
        ("INSERT INTO shipments (order_id) SELECT min(order_id) FROM shipments", "shipped_twice"),
        ("INSERT INTO shipments (order_id) SELECT min(order_id) FROM refusals", "shipped_although_rolled_back"),
    ],
)
def test_a_wrong_effect_is_found(copy: Folder, tamper: str, wrong: str) -> None:
    execute(copy.shop, tamper)
    ledger = count(copy)
    assert ledger.wrong == (wrong,)
    with pytest.raises(DemoFailed, match=f"{wrong.replace('_', ' ')} 1"):
        judge(ledger, Ended(kills=2, left=None))


def test_a_message_left_in_the_outbox_is_found(copy: Folder) -> None:
    engine = open_database(copy)
    with Session(engine) as session, session.begin():
        outbox.enqueue(session, outbox.Event(topic="orders.placed", payload={"order": 1}))
    engine.dispose()
    assert count(copy).wrong == ("left_in_the_outbox",)


def test_what_the_broker_has_twice_was_published_more_than_once(copy: Folder) -> None:
    before = count(copy).published_more_than_once
    once = (
        "SELECT payload FROM kombu_message GROUP BY json_extract(payload, '$.properties.message_id') HAVING count(*) = 1 LIMIT 1"
    )
    execute(copy.broker, f"INSERT INTO kombu_message (visible, payload, version, queue_id) SELECT 1, payload, 1, 1 FROM ({once})")
    assert count(copy).published_more_than_once == before + 1


def test_the_deadline_ends_it_and_says_what_is_left(tmp_path: Path) -> None:
    process = run("--orders", "1000000", "--timeout", "4s", "--folder", str(tmp_path))
    assert process.returncode == 1
    assert "in the outbox" in process.stderr
    assert pids_of(tmp_path) == []


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_no_process_outlives_the_demo(how: signal.Signals, tmp_path: Path) -> None:
    with subprocess.Popen([*DEMO, "--folder", str(tmp_path)], stdout=subprocess.PIPE, text=True) as demo:
        assert demo.stdout is not None
        assert any("relay started" in line for line in demo.stdout)
        children = [os.pidfd_open(pid) for pid in pids_of(tmp_path) if pid != demo.pid]
        assert children, "the consumer, and the relay unless the demo has killed it already"
        demo.send_signal(how)
        assert demo.wait() == (-how if how is signal.SIGKILL else 130)
    for child in children:
        assert select.select([child], [], [], 20)[0], "a process is still running"
        os.close(child)


def pids_of(folder: Path) -> list[int]:
    """Every process that has the folder on its command line."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and str(folder).encode() in (entry / "cmdline").read_bytes():
                found.append(int(entry.name))
        except OSError:
            continue
    return found
