"""How dead letters are listed and shown on the command line."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import click

from outbox.cli import options
from outbox.cli.printing import letter, page, plain
from outbox.errors import OutboxError

if TYPE_CHECKING:
    from collections.abc import Callable

    from outbox.cli.selecting import Wanted
    from outbox.letters import Letters
    from outbox.store.dead import Selection


def paging(limit: int) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command the options of one that looks at dead letters; they are parameters of `print_lines` and `print_pages`."""
    after = click.option(
        "--after",
        type=click.IntRange(0, 2**63 - 1),
        default=0,
        metavar="ID",
        help="Only those with a higher id, for the next page.",
    )
    most = click.option("--limit", type=click.IntRange(1, 10_000), default=limit, show_default=True, help="At most so many.")
    return lambda command: after(most(options.as_json(command)))


def print_lines(letters: Letters, *, wanted: Wanted, after: int, limit: int, as_json: bool) -> None:
    """Print dead letters, one a line."""
    rows = letters.find(wanted.at(letters.clock()), after=after, limit=limit)
    for row in rows:
        click.echo(json.dumps(plain(row)) if as_json else letter(row))
    _say_if_none(rows, as_json=as_json)


def print_pages(letters: Letters, *, wanted: Wanted, after: int, limit: int, as_json: bool) -> None:
    """Print all of some dead letters."""
    selection = wanted.at(letters.clock())
    check_named(letters, selection)
    rows = letters.find(selection, after=after, limit=limit, whole=True)
    for number, row in enumerate(rows):
        found = plain(row)
        click.echo(json.dumps(found) if as_json else "\n" * bool(number) + page(found))
    _say_if_none(rows, as_json=as_json)


def check_named(letters: Letters, selection: Selection) -> None:
    """Raise `OutboxError` if one of the messages that are named is not among the dead letters."""
    if not (named := selection.message_ids):
        return
    found = {row["message_id"] for row in letters.find(selection, limit=len(named))}
    missing = [str(each) for each in named if each not in found]
    if missing:
        raise OutboxError(
            f"no dead letter {', '.join(missing)}: it is not dead, or was retried or discarded, or other options exclude it"
        )


def _say_if_none(rows: list[dict[str, Any]], *, as_json: bool) -> None:
    if not rows and not as_json:
        click.echo("no dead messages", err=True)
