"""How dead letters are changed from the command line: never by mistake, and never in silence."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING

import click

from outbox.cli import config, options
from outbox.cli.printing import letter, plain
from outbox.cli.reading import reading
from outbox.cli.selecting import Wanted, selecting
from outbox.errors import OutboxError
from outbox.relay.dead import AT_ONCE
from outbox.store import dead as store
from outbox.tables import Tables

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import sqlalchemy as sa

    from outbox.store.dead import Selection

_FIRST = 5


@dataclass(frozen=True, slots=True)
class Change:
    """What is done to the dead letters, in two forms of its verb, and the function that does it in batches."""

    verb: str
    past: str
    batches: Callable[[sa.Connection, Tables, Selection], Iterator[int]]


def changing(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command the options of one that changes dead letters; they are the parameters of `change`."""
    for option in reversed(
        (
            config.option,
            options.database_url,
            options.schema,
            selecting,
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
    *,
    database_url: str,
    schema: str | None,
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
    tables = Tables(schema=schema)
    with reading(database_url) as connection:
        with connection.begin():
            selection = wanted.at(store.clock(connection))
            check_named(connection, tables, selection)
            total = store.count(connection, tables, selection)
            first = store.find(connection, tables, selection, limit=_FIRST)
        if dry_run:
            _foresee(what, total, first, as_json=as_json)
            return
        if total and not yes:
            click.confirm(f"{what.verb} {_messages(total)}?", abort=True, err=True)
        done = _run(what, connection, tables, selection, total)
    click.echo(json.dumps({what.past: done}) if as_json else f"{what.past} {_messages(done)}")


def check_named(connection: sa.Connection, tables: Tables, selection: Selection) -> None:
    """Raise `OutboxError` if one of the messages that are named is not among the dead letters."""
    if not (named := selection.message_ids):
        return
    found = {row["message_id"] for row in store.find(connection, tables, selection, limit=len(named))}
    missing = [str(each) for each in named if each not in found]
    if missing:
        raise OutboxError(
            f"no dead letter {', '.join(missing)}: it is not dead, or was retried or discarded, or other options exclude it"
        )


def _run(what: Change, connection: sa.Connection, tables: Tables, selection: Selection, total: int) -> int:
    done = 0
    hidden = total <= AT_ONCE or not sys.stderr.isatty()
    try:
        with click.progressbar(length=total, label=what.past, file=sys.stderr, show_pos=True, hidden=hidden) as bar:
            for changed in what.batches(connection, tables, selection):
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
