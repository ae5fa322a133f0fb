"""The demo's parts that need no processes: when it kills, what it shows, and how a bad ledger ends it."""

import io
import json
import threading
from importlib import import_module
from pathlib import Path

import pytest
from click.testing import CliRunner

from outbox.cli import main
from outbox.demo import ledger as counting
from outbox.demo import run as running
from outbox.demo.display import Display
from outbox.demo.ledger import MUST_BE_ZERO, Ledger
from outbox.demo.plan import Plan
from outbox.demo.run import Demo, Ended
from outbox.demo.watch import View

COMMAND = import_module("outbox.cli.demo")  # the attribute of that name is the command itself
BALANCED = dict.fromkeys(Ledger.__dataclass_fields__, 0)


def view(**numbers: int) -> View:
    return View(**{**dict.fromkeys(View.__dataclass_fields__, 0), **numbers})


@pytest.fixture
def ending(monkeypatch: pytest.MonkeyPatch):
    """Let the command find a ledger, and an end, without running anything."""

    def end_with(ended: Ended, **lines: int) -> None:
        monkeypatch.setattr(COMMAND, "stop_on_signals", threading.Event)
        monkeypatch.setattr(running.Demo, "run", lambda _self: ended)
        monkeypatch.setattr(counting, "count", lambda _folder: Ledger(**{**BALANCED, **lines}))

    return end_with


def test_a_ledger_that_balances_ends_with_0(ending) -> None:
    ending(Ended(kills=3, left=None), orders_committed=5, shipped=5, published_more_than_once=2, duplicates_dropped=2)
    result = CliRunner().invoke(main, ["demo"])
    assert result.exit_code == 0, result.output
    assert "killed 3 times" in result.stdout
    assert "README" in result.stdout


@pytest.mark.parametrize("line", MUST_BE_ZERO)
def test_a_ledger_that_does_not_balance_ends_with_1_and_names_the_line(ending, line: str) -> None:
    ending(Ended(kills=3, left=None), **{line: 7})
    result = CliRunner().invoke(main, ["demo"])
    assert result.exit_code == 1
    assert f"the ledger does not balance: {line.replace('_', ' ')} 7" in result.stderr
    assert "WRONG" in result.stdout
    assert "README" not in result.stdout


def test_time_that_ran_out_ends_with_1_and_says_what_is_left(ending) -> None:
    ending(Ended(kills=0, left="12 messages in the outbox"))
    result = CliRunner().invoke(main, ["demo"])
    assert result.exit_code == 1
    assert "12 messages in the outbox" in result.stderr


def test_json_is_all_that_stdout_gets(ending) -> None:
    ending(Ended(kills=1, left=None), lost=1)
    result = CliRunner().invoke(main, ["demo", "--json"])
    assert result.exit_code == 1
    assert json.loads(result.stdout) == {**BALANCED, "lost": 1}


def test_a_stopped_demo_ends_with_130(monkeypatch: pytest.MonkeyPatch) -> None:
    def stopped(_self: Demo) -> Ended:
        raise running.DemoStopped

    monkeypatch.setattr(COMMAND, "stop_on_signals", threading.Event)
    monkeypatch.setattr(running.Demo, "run", stopped)
    assert CliRunner().invoke(main, ["demo"]).exit_code == 130


@pytest.mark.parametrize(
    ("published", "in_flight", "done", "due"),
    [
        (399, 50, 0, False),  # a fourth of the 1,600 that will be committed
        (400, 50, 0, True),
        (400, 19, 0, False),  # worth it only with some messages in flight
        (601, 1, 0, True),  # unless that does not come
        (601, 0, 0, False),
        (799, 50, 1, False),
        (1600, 50, 3, False),
    ],
)
def test_kills_are_spread_over_the_run_and_hit_messages_in_flight(
    published: int, in_flight: int, done: int, *, due: bool
) -> None:
    plan = Plan(orders=2000, rollback=0.2, kills=3, timeout_s=60)
    assert plan.kill_is_due(view(published=published, in_flight=in_flight), done=done) is due


def test_nobody_is_killed_when_no_kills_are_wanted_or_nothing_is_committed() -> None:
    assert not Plan(orders=10, rollback=0, kills=0, timeout_s=60).kill_is_due(view(published=10, in_flight=5), done=0)
    assert not Plan(orders=10, rollback=1, kills=2, timeout_s=60).kill_is_due(view(), done=0)


class Terminal(io.StringIO):
    encoding = "utf-8"

    def isatty(self) -> bool:
        return True


def test_without_a_terminal_there_are_plain_lines_once_a_second() -> None:
    stream = io.StringIO()
    display = Display(stream, orders=10)
    for shipped in range(5):
        display.show(view(committed=4, shipped=shipped))
    display.say("relay killed", colour="red")
    display.end(view(committed=4, shipped=4))
    assert "\x1b" not in stream.getvalue()
    assert [line.partition(" s  ")[2] for line in stream.getvalue().splitlines()] == [
        "orders 4 (0 rolled back)  published 0 (0 again)  in flight 0  shipped 0",
        "relay killed",
        "orders 4 (0 rolled back)  published 0 (0 again)  in flight 0  shipped 4",
    ]


def test_a_terminal_gets_bars_that_are_redrawn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    stream = Terminal()
    display = Display(stream, orders=10)
    display.show(view(committed=4, rolled_back=2, shipped=4))
    display.say("relay killed", colour="red")
    assert "\x1b[3A" in stream.getvalue()
    assert "\x1b[31mrelay killed" in stream.getvalue()


def test_no_color_is_honoured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    stream = Terminal()
    display = Display(stream, orders=10)
    display.show(view(committed=4))
    display.say("relay killed", colour="red")
    assert "m" not in "".join(part[:3] for part in stream.getvalue().split("\x1b[")[1:])


def test_a_folder_that_cannot_be_made_is_a_usage_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert CliRunner().invoke(main, ["demo", "--folder", str(tmp_path / "file")]).exit_code == 2
