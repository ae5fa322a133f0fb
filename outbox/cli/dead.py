"""`outbox-relay dead`: look at the dead letters, give them another chance, or up for good."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import click

from outbox.cli import config, options
from outbox.cli.changing import Change, change, changing, check_named
from outbox.cli.exit import Command, Group
from outbox.cli.printing import letter, page, plain
from outbox.cli.reading import reading
from outbox.cli.selecting import Wanted, selecting
from outbox.relay import dead as letters
from outbox.store import dead as store
from outbox.tables import Tables

if TYPE_CHECKING:
    from collections.abc import Callable

_RETRY = Change("retry", "retried", letters.retry)
_DISCARD = Change("discard", "discarded", letters.discard)

_after = click.option(
    "--after", type=click.IntRange(0, 2**63 - 1), default=0, metavar="ID", help="Only those with a higher id, for the next page."
)


def _limit(default: int) -> Callable[[Callable[..., None]], Callable[..., None]]:
    return click.option("--limit", type=click.IntRange(1, 10_000), default=default, show_default=True, help="At most so many.")


@click.group(cls=Group)
def dead() -> None:
    """Look at messages that were given up; retry or discard them."""


@dead.command("list", cls=Command)
@config.option
@options.database_url
@options.schema
@selecting
@_after
@_limit(50)
@options.as_json
def list_letters(*, database_url: str, schema: str | None, wanted: Wanted, after: int, limit: int, as_json: bool) -> None:
    """List dead letters, the oldest first, without their payloads. With --json one object on each line.

    Example: outbox-relay dead list --topic "orders.#" --since 2h
    """
    with reading(database_url) as connection:
        selection = wanted.at(store.clock(connection))
        rows = store.find(connection, Tables(schema=schema), selection, after=after, limit=limit)
    for row in rows:
        click.echo(json.dumps(plain(row)) if as_json else letter(row))
    _say_if_none(rows, as_json=as_json)


@dead.command(cls=Command)
@config.option
@options.database_url
@options.schema
@selecting
@_after
@_limit(10)
@options.as_json
def show(*, database_url: str, schema: str | None, wanted: Wanted, after: int, limit: int, as_json: bool) -> None:
    """Show all of some dead letters: every column, every attempt that failed, and the payload.

    Example: outbox-relay dead show 0198c5a7-6b1e-7c3f-8a53-0f5d5f9d2b11
    """
    tables = Tables(schema=schema)
    with reading(database_url) as connection:
        selection = wanted.at(store.clock(connection))
        check_named(connection, tables, selection)
        rows = store.find(connection, tables, selection, after=after, limit=limit, whole=True)
    for number, row in enumerate(rows):
        found = plain(row)
        click.echo(json.dumps(found) if as_json else "\n" * bool(number) + page(found))
    _say_if_none(rows, as_json=as_json)


@dead.command(cls=Command)
@changing
def retry(**asked: Any) -> None:
    """Let dead letters be published after all, with all their attempts before them.

    They keep their message ids, and within a key their order: one whose earlier message is still dead, or backing off, waits
    for that one. So retry the first of a key, and what is blocked behind it follows by itself. What is Parked does not, it is
    dead too: retry the whole key (--key). Parked ones that are retried without the first are parked again. With the policy
    skip, a retried message comes after those of its key that have gone on without it. What dies during the run is left alone.

    \b
    Example: outbox-relay dead retry --topic "orders.#" --error-class Unroutable --dry-run
             outbox-relay dead retry --key customer-17 --yes
    """
    change(_RETRY, **asked)


@dead.command(cls=Command)
@changing
def discard(**asked: Any) -> None:
    """Delete dead letters for good: they will never be published.

    What is blocked behind one goes on without it, unless another message of its key is dead or backing off. What dies during
    the run is left alone.

    \b
    Example: outbox-relay dead discard 0198c5a7-6b1e-7c3f-8a53-0f5d5f9d2b11
             outbox-relay dead discard --until 30d --yes
    """
    change(_DISCARD, **asked)


def _say_if_none(rows: list[dict[str, Any]], *, as_json: bool) -> None:
    if not rows and not as_json:
        click.echo("no dead messages", err=True)
