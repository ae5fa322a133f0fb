"""`outbox-consume handlers`: the register of what a second execution of each handler would mean."""

from __future__ import annotations

import json
from functools import partial
from typing import TYPE_CHECKING, Any

import click

from outbox.cli import inbox, options
from outbox.cli.exit import Command
from outbox.cli.printing import printable
from outbox.inbox.handlers import Mode

if TYPE_CHECKING:
    from collections.abc import Iterable

    from outbox.inbox.handlers import Handling, Rules

_HEADINGS = ("pattern", "handler", "mode", "tries", "then", "time limits", "reason")


@click.command(cls=Command, short_help="List the handlers, and what a second execution means.")
@inbox.argument
@options.as_json
def handlers(*, path: str, as_json: bool) -> None:
    """List the handlers of an inbox in the order in which they are tried, and what keeps a second execution from harm.

    \b
    transactional  its effects commit together with the record of the message
    leased         its effects are elsewhere: a lease, and an idempotency key for the other system
    idempotent     nothing does; the reason says why to repeat it changes nothing

    With --json one object on each line. Needs neither broker nor database.

    Example: outbox-consume handlers shop.shipping:inbox
    """
    found = inbox.find_inbox(path).handlers
    if as_json:
        for handling in found:
            click.echo(json.dumps(_plain(handling)))
        return
    rows = [_HEADINGS, *(_row(handling) for handling in found)]
    widths = [max(len(row[place]) for row in rows) for place in range(len(_HEADINGS))]
    for row in rows:
        click.echo("  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip())
    if not found:
        click.echo("no handlers", err=True)


def _plain(handling: Handling) -> dict[str, Any]:
    rules, retry = handling.rules, handling.rules.retry
    return {
        "pattern": handling.pattern,
        "handler": _name(handling.handler),
        "mode": handling.mode,
        "because": handling.because,
        "max_attempts": retry.max_attempts,
        "max_age_s": retry.max_age_s,
        "first_s": retry.backoff.first_s,
        "ceiling_s": retry.backoff.ceiling_s,
        "on_dead": retry.on_dead,
        "retry_on": _names(rules.retry_on),
        "permanent": _names(rules.permanent),
        "soft_limit_s": rules.soft_limit_s,
        "time_limit_s": rules.time_limit_s,
        "lease_s": rules.lease_s if handling.mode is Mode.LEASED else None,
    }


def _row(handling: Handling) -> tuple[str, ...]:
    rules = handling.rules
    soft = "" if rules.soft_limit_s is None else f"{rules.soft_limit_s:g} s, then "
    lease = f", lease {rules.lease_s:g} s" if handling.mode is Mode.LEASED else ""
    limits = f"{soft}{rules.time_limit_s:g} s{lease}"
    because = printable(handling.because or "")
    return handling.pattern, _name(handling.handler), handling.mode, _tries(rules), rules.retry.on_dead, limits, because


def _tries(rules: Rules) -> str:
    retry = rules.retry
    parts = [f"{retry.max_attempts}, {retry.backoff.first_s:g} s to {retry.backoff.ceiling_s:g} s apart"]
    if retry.max_age_s is not None:
        parts.append(f"for {retry.max_age_s:g} s")
    if rules.retry_on:
        parts.append(f"only after {', '.join(_names(rules.retry_on))}")
    if rules.permanent:
        parts.append(f"never after {', '.join(_names(rules.permanent))}")
    return ", ".join(parts)


def _name(handler: Any) -> str:
    while isinstance(handler, partial):
        handler = handler.func
    named = handler if hasattr(handler, "__qualname__") else type(handler)
    return f"{named.__module__}.{named.__qualname__}"


def _names(classes: Iterable[type[BaseException]]) -> list[str]:
    return [each.__name__ for each in classes]
