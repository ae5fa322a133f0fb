"""`outbox-relay dead`: look at the dead letters, give them another chance, or up for good."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import click

from outbox.cli import config, options
from outbox.cli.changing import DISCARD, RETRY, asking, change
from outbox.cli.exit import Command, Group
from outbox.cli.looking import paging, print_lines, print_pages
from outbox.cli.reading import reading
from outbox.cli.selecting import selecting
from outbox.relay.dead import RelayLetters
from outbox.tables import Tables

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from outbox.letters import Letters


def _which(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command the options that say which dead letters, and where they are."""
    return config.option(options.database_url(options.schema(selecting(click.UUID)(command))))


@contextmanager
def _letters(database_url: str, schema: str | None) -> Iterator[Letters]:
    with reading(database_url) as connection:
        yield RelayLetters(connection, Tables(schema=schema))


@click.group(cls=Group)
def dead() -> None:
    """Look at messages that were given up; retry or discard them.

    One that followed an earlier dead one of its key has the error class Parked.
    """


@dead.command("list", cls=Command)
@_which
@paging(50)
def list_letters(*, database_url: str, schema: str | None, **asked: Any) -> None:
    """List dead letters, the oldest first, without their payloads. With --json one object on each line.

    Example: outbox-relay dead list --topic "orders.#" --since 2h
    """
    with _letters(database_url, schema) as letters:
        print_lines(letters, **asked)


@dead.command(cls=Command)
@_which
@paging(10)
def show(*, database_url: str, schema: str | None, **asked: Any) -> None:
    """Show all of some dead letters: every column, every attempt that failed, and the payload.

    Example: outbox-relay dead show 0198c5a7-6b1e-7c3f-8a53-0f5d5f9d2b11
    """
    with _letters(database_url, schema) as letters:
        print_pages(letters, **asked)


@dead.command(cls=Command)
@_which
@asking
def retry(*, database_url: str, schema: str | None, **asked: Any) -> None:
    """Let dead letters be published after all, with all their attempts before them.

    They keep their message ids, and within a key their order: one whose earlier message is still dead, or backing off, waits
    for that one. So retry the first of a key, and what is blocked behind it follows by itself. What is Parked does not, it is
    dead too: retry the whole key (--key). Parked ones that are retried without the first are parked again. With the policy
    skip, a retried message comes after those of its key that have gone on without it. What dies during the run is left alone.

    \b
    Example: outbox-relay dead retry --topic "orders.#" --error-class Unroutable --dry-run
             outbox-relay dead retry --key customer-17 --yes
    """
    change(RETRY, _letters(database_url, schema), **asked)


@dead.command(cls=Command)
@_which
@asking
def discard(*, database_url: str, schema: str | None, **asked: Any) -> None:
    """Delete dead letters for good: they will never be published.

    What is blocked behind one goes on without it, unless another message of its key is dead or backing off. What dies during
    the run is left alone.

    \b
    Example: outbox-relay dead discard 0198c5a7-6b1e-7c3f-8a53-0f5d5f9d2b11
             outbox-relay dead discard --until 30d --yes
    """
    change(DISCARD, _letters(database_url, schema), **asked)
