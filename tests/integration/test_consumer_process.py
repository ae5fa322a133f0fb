"""The command `outbox-consume` as a process: signals, crashes at the worst moment, and its exit codes."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import sqlalchemy as sa
from sqlalchemy.orm import Session

from tests.integration.consuming import WAIT_S, Shop, record, running, until

ROOT = Path(__file__).parents[2]
GATE = 7  # an advisory lock: whoever holds it decides when the handler goes on

APP = """
import os
import signal
import sqlalchemy as sa
from sqlalchemy.orm import sessionmaker
from outbox import Inbox

sessions = sessionmaker(sa.create_engine(os.environ["SHOP_DATABASE"]))
inbox = Inbox("shipping", sessions=sessions, lock_timeout_s=None)

@inbox.transactional("orders.*")
def ship(session, message):
    session.execute(sa.text("INSERT INTO effects VALUES (:id)"), {"id": message.message_id})
    session.execute(sa.text("SELECT pg_advisory_xact_lock(7)"))

if os.environ.get("SHOP_DIES_AFTER_COMMIT"):
    from outbox import points

    def die(point):
        if point is points.Point.BEFORE_ACK:
            os.kill(os.getpid(), signal.SIGKILL)

    points.hook = die
"""


@pytest.fixture
def shop(database_url: str, vhost_url: str) -> Iterator[Shop]:
    shop = Shop(database_url, vhost_url)
    shop.inbox.transactional("orders.*")(record)
    shop.declare()
    yield shop
    shop.close()


@contextmanager
def consume(shop: Shop, folder: Path, *arguments: str, inbox: str = "app:inbox", **env: str) -> Iterator[subprocess.Popen[str]]:
    (folder / "app.py").write_text(APP)
    command = [sys.executable, "-c", "from outbox.cli.consume import main; main()", inbox, *arguments]
    database = shop.engine.url.render_as_string(hide_password=False)
    env = {**os.environ, "PYTHONPATH": str(ROOT), "SHOP_DATABASE": database, "OUTBOX_BROKER_URL": shop.broker_url, **env}
    with subprocess.Popen(command, cwd=folder, env=env, stderr=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


@contextmanager
def closed_gate(shop: Shop) -> Iterator[None]:
    with Session(shop.engine) as session, session.begin():
        session.execute(sa.text(f"SELECT pg_advisory_xact_lock({GATE})"))
        yield


def test_sigterm_finishes_what_is_running_and_leaves_the_rest(shop: Shop, tmp_path: Path) -> None:
    shop.publish(*"abcde")
    with consume(shop, tmp_path) as process:
        with closed_gate(shop):
            until(lambda: shop.lock_waits() == 1)
            process.send_signal(signal.SIGTERM)
            assert "handlers=1" in _read_until(process, "finishing")
        _, stderr = process.communicate(timeout=WAIT_S)
    assert process.returncode == 0, stderr
    assert shop.effects() == ["a"]
    until(lambda: shop.queued() == 4)
    with running(shop.inbox, shop.broker_url) as runner:
        until(lambda: runner.counts == {"handled": 4})
    assert shop.effects() == list("abcde")
    assert "Traceback" not in stderr
    assert "INFO outbox.inbox stopped consumer=shipping handled=1" in stderr


def test_kill_between_commit_and_acknowledgement_leaves_a_duplicate_that_is_dropped(shop: Shop, tmp_path: Path) -> None:
    shop.publish("a")
    with consume(shop, tmp_path, SHOP_DIES_AFTER_COMMIT="1") as process:
        assert process.wait(WAIT_S) == -signal.SIGKILL
    assert shop.effects() == ["a"]
    with running(shop.inbox, shop.broker_url) as runner:
        until(lambda: runner.counts == {"duplicate": 1})
    assert shop.effects() == ["a"]
    assert shop.queued() == 0


def test_kill_while_handling_leaves_no_effect_and_the_message(shop: Shop, tmp_path: Path) -> None:
    shop.publish("a")
    with consume(shop, tmp_path) as process, closed_gate(shop):
        until(lambda: shop.lock_waits() == 1)
        process.kill()
        assert process.wait(WAIT_S) == -signal.SIGKILL
    until(lambda: shop.queued() == 1)
    until(lambda: shop.lock_waits() == 0)
    assert shop.effects() == []
    with running(shop.inbox, shop.broker_url) as runner:
        until(lambda: runner.counts["handled"] == 1)
    assert shop.effects() == ["a"]


def test_a_second_signal_ends_it_at_once(shop: Shop, tmp_path: Path) -> None:
    shop.publish("a")
    with consume(shop, tmp_path) as process, closed_gate(shop):
        until(lambda: shop.lock_waits() == 1)
        process.send_signal(signal.SIGINT)
        _read_until(process, "finishing")
        process.send_signal(signal.SIGTERM)
        assert process.wait(WAIT_S) == 130
    until(lambda: shop.queued() == 1)


@pytest.mark.parametrize(
    ("inbox", "text"),
    [
        ("nowhere:inbox", "no module 'nowhere'"),
        ("app:box", "'app:box' is no outbox.Inbox but None"),
        ("app:sessions", "no outbox.Inbox"),
        ("app", "write MODULE:INBOX"),
    ],
)
def test_wrong_inbox_is_a_usage_error(shop: Shop, tmp_path: Path, inbox: str, text: str) -> None:
    with consume(shop, tmp_path, inbox=inbox) as process:
        _, stderr = process.communicate(timeout=WAIT_S)
    assert process.returncode == 2
    assert text in stderr
    assert "Traceback" not in stderr


def test_broker_that_refuses_is_exit_code_4(shop: Shop, tmp_path: Path) -> None:
    with consume(shop, tmp_path, "--broker-url", shop.broker_url + "-missing") as process:
        _, stderr = process.communicate(timeout=WAIT_S)
    assert process.returncode == 4
    assert "NOT_ALLOWED" in stderr


def _read_until(process: subprocess.Popen[str], text: str) -> str:
    assert process.stderr is not None
    return next(line for line in process.stderr if text in line)
