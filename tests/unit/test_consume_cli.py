"""`outbox-consume`: its commands, what goes without one, the register of handlers, and the exit code of a consumer that hangs."""

import json
import os
import subprocess
import sys
from functools import partial
from pathlib import Path
from types import ModuleType

import kombu
import pytest
import sqlalchemy as sa
from sqlalchemy.orm import sessionmaker

import outbox
from outbox import Inbox, Message
from outbox.backoff import Backoff
from outbox.cli import consume_run
from outbox.cli.exit import STUCK, USAGE
from outbox.inbox.runner import Runner
from outbox.states import OnDead, RetryPolicy
from tests.consumers import Refused, call

ROOT = Path(__file__).parents[2]
STRICT = RetryPolicy(max_attempts=3, backoff=Backoff(first_s=0.5, ceiling_s=60), max_age_s=3600, on_dead=OnDead.BLOCK)


class Notify:
    def __call__(self, lease: object, message: Message) -> None: ...


def ship(session: object, message: Message) -> None: ...


@pytest.fixture
def inbox(monkeypatch: pytest.MonkeyPatch) -> Inbox:
    inbox, module = Inbox("shipping", sessions=sessionmaker(sa.create_engine("sqlite://"))), ModuleType("shop")
    vars(module)["inbox"] = inbox
    monkeypatch.setitem(sys.modules, "shop", module)
    return inbox


# The register


def test_handlers_are_listed_with_what_a_second_execution_means(inbox: Inbox) -> None:
    inbox.transactional("orders.placed", "orders.*.paid", retry=STRICT, retry_on=(OSError,), permanent=(Refused, KeyError))(ship)
    inbox.leased("mail.#", soft_limit_s=2, time_limit_s=2.5, lease_s=45)(Notify())
    inbox.idempotent("#", because="it sets a flag\n")(partial(ship))

    lines = call("handlers", "shop:inbox").stdout.splitlines()
    assert [line.split() for line in lines] == [
        ["pattern", "handler", "mode", "tries", "then", "time", "limits", "reason"],
        f"orders.placed {__name__}.ship transactional 3, 0.5 s to 60 s apart, for 3600 s,"
        " only after OSError, never after Refused, KeyError block 300 s".split(),
        f"orders.*.paid {__name__}.ship transactional 3, 0.5 s to 60 s apart, for 3600 s,"
        " only after OSError, never after Refused, KeyError block 300 s".split(),
        f"mail.# {__name__}.Notify leased 20, 1 s to 300 s apart block 2 s, then 2.5 s, lease 45 s".split(),
        f"# {__name__}.ship idempotent 20, 1 s to 300 s apart block 300 s it sets a flag\\n".split(),
    ]
    first, _second, third, last = (json.loads(line) for line in call("handlers", "shop:inbox", "--json").stdout.splitlines())
    assert first == {
        "pattern": "orders.placed",
        "handler": f"{__name__}.ship",
        "mode": "transactional",
        "because": None,
        "max_attempts": 3,
        "max_age_s": 3600,
        "first_s": 0.5,
        "ceiling_s": 60,
        "on_dead": "block",
        "retry_on": ["OSError"],
        "permanent": ["Refused", "KeyError"],
        "soft_limit_s": None,
        "time_limit_s": 300,
        "lease_s": None,
    }
    assert [third[name] for name in ("mode", "soft_limit_s", "time_limit_s", "lease_s")] == ["leased", 2, 2.5, 45]
    assert (last["mode"], last["because"]) == ("idempotent", "it sets a flag\n")


# Commands


@pytest.mark.parametrize(
    "arguments",
    [
        ["shop:inbox", "--workers", "3", "--broker-url", "memory://"],
        ["--workers", "3", "--broker-url", "memory://", "shop:inbox"],
        ["--workers=3", "shop:inbox", "--broker-url", "memory://"],
        ["run", "shop:inbox", "--workers", "3", "--broker-url", "memory://"],
        ["run", "--broker-url", "memory://", "--workers", "3", "shop:inbox"],
    ],
)
def test_an_inbox_without_a_command_is_run(inbox: Inbox, monkeypatch: pytest.MonkeyPatch, arguments: list[str]) -> None:
    inbox.transactional("#")(ship)
    ran = []
    monkeypatch.setattr(Runner, "run", lambda self, _stop: ran.append((self._inbox, self._threads)))
    monkeypatch.setattr(consume_run, "stop_on_signals", lambda: None)
    call(*arguments)
    assert ran == [(inbox, 3)]


def test_the_help_explains_both_forms() -> None:
    shown = call("--help").stdout
    assert "Usage: outbox-consume MODULE:INBOX [OPTIONS of run]\n       outbox-consume COMMAND MODULE:INBOX [OPTIONS]\n" in shown
    for command in ("run", "status", "dead", "handlers"):
        assert f"\n  {command} " in shown
    assert call("shop:inbox", "--help").stdout == call("run", "--help").stdout
    assert f"exit code {STUCK}" in " ".join(call("run", "--help").stdout.split())
    assert "nothing deletes them by itself" in " ".join(call("dead", "--help").stdout.split())


def test_what_is_no_command_and_no_inbox_is_a_usage_error() -> None:
    assert "No such command 'stats'. Did you mean 'status'?" in call("stats", "shop:inbox", code=USAGE).stderr
    assert "write MODULE:INBOX" in call("status", "shop", code=USAGE).stderr
    assert "write MODULE:INBOX" in call("shop", "--broker-url", "memory://", code=USAGE).stderr
    assert "outbox-consume MODULE:INBOX" in call(code=USAGE).output


# Handlers that hang

APP = """
import threading
import sqlalchemy as sa
from sqlalchemy.orm import sessionmaker
from outbox import Inbox

inbox = Inbox("shipping", sessions=sessionmaker(sa.create_engine("sqlite:///shop.db")))

@inbox.idempotent("orders.*", because="it has no effect", time_limit_s=0.1)
def hang(session, message):
    threading.Event().wait()
"""


# kombu's SQLAlchemy transport uses what SQLAlchemy 2.1 deprecates, and does what 2.0.0 warned of on SQLite
@pytest.mark.filterwarnings("ignore:The ``noload`` loader:sqlalchemy.exc.SADeprecationWarning")
@pytest.mark.filterwarnings("ignore:Dialect sqlite:sqlalchemy.exc.SAWarning")
def test_a_consumer_whose_handlers_hang_past_their_limits_ends_with_a_code_of_its_own(tmp_path: Path) -> None:
    (tmp_path / "app.py").write_text(APP)
    engine = sa.create_engine(f"sqlite:///{tmp_path}/shop.db")
    outbox.metadata.create_all(engine)
    engine.dispose()
    broker_url = f"sqla+sqlite:///{tmp_path}/mq.db"
    with kombu.Connection(broker_url) as connection:
        queue = kombu.Queue("shipping", kombu.Exchange("outbox", type="topic"), routing_key="orders.*")
        for number in range(12):
            producer = connection.Producer()
            producer.publish(b"{}", exchange=queue.exchange, routing_key="orders.placed", declare=[queue], message_id=f"{number}")
    command = [sys.executable, "-m", "outbox.cli.consume", "app:inbox", "--workers", "4", "--broker-url", broker_url]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == STUCK, done.stderr
    assert "handlers hang past their time limits; this process has to be started again" in done.stderr
    assert "Traceback" not in done.stderr.partition("Error: ")[2]
