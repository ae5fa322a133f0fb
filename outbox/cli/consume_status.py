"""`outbox-consume status`: one look at a consumer."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import TYPE_CHECKING

import click

from outbox.cli import inbox, options
from outbox.cli.exit import Command
from outbox.cli.printing import letter, plain
from outbox.inbox.looking import look

if TYPE_CHECKING:
    from outbox.store.failed_stats import ConsumerStats


@click.command(cls=Command, short_help="Show what has failed, waits, and is held.")
@inbox.argument
@options.as_json
def status(*, path: str, as_json: bool) -> None:
    """Show how many messages of a consumer have failed and stand where, how old the oldest is, and what was given up last.

    retry: tried again when it is due, or being tried. blocked: waits behind an earlier message of its key. dead: given up,
    until somebody retries or discards it. leases: messages that workers hold for effects outside the database; expired ones
    were left by workers that died. Each is counted up to 10,000, which is shown as 10000+ (in JSON: as the number in
    counted_up_to).

    Example: outbox-consume status shop.shipping:inbox --json
    """
    with inbox.working(path) as (found, run):
        stats = run(look, found)
    if as_json:
        newest = None if stats.newest_dead is None else plain(stats.newest_dead)
        click.echo(json.dumps({"consumer": found.consumer, **asdict(stats), "newest_dead": newest}))
        return
    click.echo("\n".join(_lines(found.consumer, stats)))


def _lines(consumer: str, stats: ConsumerStats) -> list[str]:
    def count(number: int) -> str:
        return f"{number}{'+' if number >= stats.counted_up_to else ''}"

    counts = "  ".join(f"{state} {count(number)}" for state, number in stats.messages.items())
    more = "at least " if max(stats.messages["retry"], stats.messages["blocked"]) >= stats.counted_up_to else ""
    oldest = "none" if stats.oldest_waiting_s is None else f"{more}{stats.oldest_waiting_s:.1f} s"
    return [
        f"consumer        {consumer}",
        f"failed          {counts}",
        f"oldest waiting  {oldest}",
        f"leases          held {count(stats.leases)}  expired {count(stats.expired)}",
        f"newest dead     {'none' if stats.newest_dead is None else letter(stats.newest_dead).strip()}",
    ]
