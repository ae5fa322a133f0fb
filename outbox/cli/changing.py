"""How dead letters are changed from the command line: never by mistake, and never in silence."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING

import click

from outbox.cli import options
from outbox.cli.looking import check_named
from outbox.cli.printing import letter, plain
from outbox.letters import AT_ONCE

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from contextlib import AbstractContextManager

    from outbox.cli.selecting import Wanted
    from outbox.letters import Letters
    from outbox.store.dead import Selection

_FIRST = 5


@dataclass(frozen=True, slots=True)
class Change:
    """What is done to dead letters, in two forms of its verb, and the function that does it in batches."""

    verb: str
    past: str
    batches: Callable[[Letters, Selection], Iterator[int]]


RETRY = Change("retry", "retried", lambda letters, selection: letters.retry(selection))
DISCARD = Change("discard", "discarded", lambda letters, selection: letters.discard(selection))


def asking(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command the options of one that changes dead letters; they are parameters of `change`."""
    for option in reversed(
        (
            click.option("--all", "everything", is_flag=True, help="All dead letters, instead of a selection."),
            click.option("--dry-run", is_flag=True, help="Change nothing; say how many it would be, and show the first."),
            click.option("--yes", is_flag=True, help="Do not ask. Needed where there is no terminal to ask at."),
            options.as_json,
        )
    ):
        command = option(command)
    return command


def change(
    what: Change,
    opening: AbstractContextManager[Letters],
    *,
    wanted: Wanted,
    everything: bool,
    dry_run: bool,
    yes: bool,
    as_json: bool,
) -> None:
    """Select, ask, change, and say what was done."""
    if wanted.given == everything:
        raise click.UsageError(f"say which messages to {what.verb}, or --all" + (", not both" if everything else ""))
    if not (yes or dry_run or sys.stdin.isatty()):
        raise click.UsageError(f"there is no terminal to ask at; to {what.verb} them, add --yes (--dry-run shows them)")
    with opening as letters:
        selection = wanted.at(letters.clock())
        check_named(letters, selection)
        total = letters.count(selection)
        if dry_run:
            _foresee(what, total, letters.find(selection, limit=_FIRST), as_json=as_json)
            return
        if total and not yes:
            click.confirm(f"{what.verb} {_messages(total)}?", abort=True, err=True)
        done = _run(what, letters, selection, total)
    click.echo(json.dumps({what.past: done}) if as_json else f"{what.past} {_messages(done)}")


def _run(what: Change, letters: Letters, selection: Selection, total: int) -> int:
    done = 0
    hidden = total <= AT_ONCE or not sys.stderr.isatty()
    try:
        with click.progressbar(length=total, label=what.past, file=sys.stderr, show_pos=True, hidden=hidden) as bar:
            for changed in what.batches(letters, selection):
                done += changed
                bar.update(changed)
    except BaseException:  # also Ctrl-C: the batches before it are committed
        click.echo(f"{what.past} {_messages(done)} before this", err=True)
        raise
    return done


def _foresee(what: Change, total: int, first: list[dict[str, object]], *, as_json: bool) -> None:
    if as_json:
        click.echo(json.dumps({f"would_{what.verb}": total, "first": [plain(row) for row in first]}))
        return
    click.echo(f"would {what.verb} {_messages(total)}")
    for row in first:
        click.echo(letter(row))
    if total > len(first):
        click.echo(f"and {total - len(first):,} more")


def _messages(number: int) -> str:
    return f"{number:,} message{'' if number == 1 else 's'}"
