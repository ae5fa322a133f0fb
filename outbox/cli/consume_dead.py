"""`outbox-consume dead`: look at what a consumer has given up, give it another chance, or up for good."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import click

from outbox.cli import inbox
from outbox.cli.changing import DISCARD, RETRY, asking, change
from outbox.cli.exit import Command, Group
from outbox.cli.looking import paging, print_lines, print_pages
from outbox.cli.selecting import selecting
from outbox.inbox.dead import FailedLetters

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from outbox.letters import Letters


def _which(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command the options that say which dead letters, and of which inbox."""
    return inbox.argument(selecting(click.STRING)(command))


@contextmanager
def _letters(path: str) -> Iterator[Letters]:
    with inbox.working(path) as (found, run):
        yield FailedLetters(found, run)


@click.group(cls=Group, short_help="List, show, retry and discard what was given up.")
def dead() -> None:
    """Look at messages that a consumer has given up; retry or discard them.

    They stay in the table failed_messages until somebody does one or the other: nothing deletes them by itself, however old
    they are. For a limit of your own, run discard from a cron job: outbox-consume dead discard MODULE:INBOX --until 90d --yes
    """


@dead.command("list", cls=Command)
@_which
@paging(50)
def list_letters(*, path: str, **asked: Any) -> None:
    """List dead messages, the oldest first, without their payloads. With --json one object on each line.

    Example: outbox-consume dead list shop.shipping:inbox --topic "orders.#" --since 2h
    """
    with _letters(path) as letters:
        print_lines(letters, **asked)


@dead.command(cls=Command)
@_which
@paging(10)
def show(*, path: str, **asked: Any) -> None:
    """Show all of some dead messages: every column, every try that failed, and the payload.

    Example: outbox-consume dead show shop.shipping:inbox 0198c5a7-6b1e-7c3f-8a53-0f5d5f9d2b11
    """
    with _letters(path) as letters:
        print_pages(letters, **asked)


@dead.command(cls=Command)
@_which
@asking
def retry(*, path: str, **asked: Any) -> None:
    """Let dead messages be handled after all, at once, with all the tries of their policy before them.

    They keep their ids and their place, and the failures so far stay on record. A consumer that runs takes them up within a
    second or so. One that is older than the max_age_s of its policy has one more try.

    In an ordered inbox a retried message overtakes nothing of its key: it waits while another one is being tried or an earlier
    one waits, and where the policy is to block also while an earlier one is dead. So retry the first of a key, and what waits
    behind it follows by itself. Where the policy is to skip, those that have gone on without it are before it.

    What dies during the run is left alone.

    \b
    Example: outbox-consume dead retry shop.shipping:inbox --error-class Timeout --dry-run
             outbox-consume dead retry shop.shipping:inbox --key customer-17 --yes
    """
    change(RETRY, _letters(path), **asked)


@dead.command(cls=Command)
@_which
@asking
def discard(*, path: str, **asked: Any) -> None:
    """Delete dead messages for good: they will never be handled, unless they are published again.

    In an ordered inbox the next of the key goes on, unless another one is being tried, or an earlier one is dead and the policy
    is to block. What dies during the run is left alone.

    \b
    Example: outbox-consume dead discard shop.shipping:inbox 0198c5a7-6b1e-7c3f-8a53-0f5d5f9d2b11
             outbox-consume dead discard shop.shipping:inbox --until 90d --yes
    """
    change(DISCARD, _letters(path), **asked)
