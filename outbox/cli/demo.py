"""`outbox-relay demo`: all of it at work in one folder, without a server."""

from __future__ import annotations

import json
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

import click

from outbox.cli import options
from outbox.cli.exit import Command
from outbox.cli.types import DURATION
from outbox.lifecycle import KILLED, stop_on_signals

if TYPE_CHECKING:
    from outbox.demo.folder import Folder
    from outbox.demo.plan import Plan


@click.command(cls=Command)
@click.option("--orders", type=click.IntRange(1, 1_000_000), default=2000, show_default=True, help="How many orders to place.")
@click.option("--rollback", type=click.FloatRange(0, 1), default=0.2, show_default=True, help="The part that is rolled back.")
@click.option("--kills", type=click.IntRange(0, 100), default=3, show_default=True, help="How often to kill the relay.")
@click.option("--folder", type=click.Path(path_type=Path, file_okay=False), help="Where to run, to look at it afterwards.")
@click.option("--timeout", type=DURATION, default="120s", show_default=True, help="Give up after so long (exit code 1).")
@options.as_json
def demo(*, orders: int, rollback: float, kills: int, folder: Path | None, timeout: float, as_json: bool) -> None:
    """Show that nothing is lost and nothing happens twice, on this machine and without a server.

    A shop places orders, each in one transaction with its event, and rolls some back. The relay, a process of its own, is
    killed with SIGKILL while it has messages in flight, and is started again. A consumer ships. In the end a ledger is
    counted from the tables, and the exit code is 1 if it does not balance.

    Example: outbox-relay demo --orders 5000 --folder ./demo
    """
    from outbox.demo.folder import Folder, temporary
    from outbox.demo.plan import Plan

    plan = Plan(orders=orders, rollback=rollback, kills=kills, timeout_s=timeout)
    with nullcontext(Folder(folder.resolve())) if folder else temporary(orders=orders) as place:
        _play(place, plan, as_json=as_json)
    if folder and not as_json:
        click.echo(f"All of it is in {folder}: shop.db, broker.db, relay.toml and the logs.")


def _play(folder: Folder, plan: Plan, *, as_json: bool) -> None:
    from outbox.demo.display import Display
    from outbox.demo.ledger import count
    from outbox.demo.report import judge, write_ledger, write_lesson
    from outbox.demo.run import Demo, DemoStopped

    display = Display(sys.stderr if as_json else sys.stdout, orders=plan.orders)
    try:
        ended = Demo(folder, plan, display, stop_on_signals()).run()
    except DemoStopped:
        click.echo("stopped", err=True)
        raise SystemExit(KILLED) from None
    ledger = count(folder)
    if as_json:
        click.echo(json.dumps(ledger.lines))
    else:
        write_ledger(display, ledger)
    judge(ledger, ended)
    if not as_json:
        write_lesson(display, ledger, ended)
