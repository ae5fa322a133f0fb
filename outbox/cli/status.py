"""`outbox-relay status`: one look at the outbox."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import TYPE_CHECKING

import click

from outbox.cli import config, options
from outbox.cli.exit import Command
from outbox.cli.reading import reading
from outbox.identity import PARTITIONS
from outbox.store.pauses import listed
from outbox.store.registry import relays
from outbox.store.stats import Stats, stats
from outbox.tables import Tables

if TYPE_CHECKING:
    from outbox.store.pauses import Pause
    from outbox.store.registry import Seen


@click.command(cls=Command)
@config.option
@options.database_url
@options.schema
@options.as_json
def status(*, database_url: str, schema: str | None, as_json: bool) -> None:
    """Show how many messages stand where, how old the oldest is, which relays are at work, and what is paused.

    A relay says of the broker: connected, unreachable, or blocked (a memory or disk alarm makes it take nothing). One that has
    not been seen for a minute is silent: it hangs, is cut off from the database, or was killed. Messages of a state are counted
    up to 10,000, which is shown as 10000+ (in JSON: as the number in counted_up_to), so that it is quick among millions.

    Example: outbox-relay status --database-url postgresql://app@db/shop --json
    """
    tables = Tables(schema=schema)
    with reading(database_url) as connection:
        found, at_work, paused = stats(connection, tables), relays(connection, tables), listed(connection, tables)
    if as_json:
        plain = asdict(found) | {"relays": [asdict(each) for each in at_work], "paused": [asdict(each) for each in paused]}
        click.echo(json.dumps(plain))
        return
    click.echo("\n".join([*_counts(found), *_leases(found), *_relays(at_work), *_pauses(paused)]))


def _counts(found: Stats) -> list[str]:
    counts = "  ".join(f"{state} {count}{'+' if count >= found.counted_up_to else ''}" for state, count in found.messages.items())
    oldest = "none" if found.oldest_unsent_s is None else f"{found.oldest_unsent_s:.1f} s"
    return [
        f"messages       {counts}",
        f"oldest unsent  {oldest}",
        f"totals         published {found.published}  failed tries {found.failed}",
    ]


def _leases(found: Stats) -> list[str]:
    lines = [f"partitions     {sum(len(held.partitions) for held in found.leases)} of {PARTITIONS} leased"]
    for held in found.leases:
        listed = ", ".join(map(str, held.partitions))
        lines.append(f"  {held.owner}  partitions {listed}  expires in {held.expires_in_s:.1f} s")
    return lines


def _relays(at_work: list[Seen]) -> list[str]:
    silent = sum(each.silent for each in at_work)
    lines = [f"relays         {len(at_work) - silent} at work" + (f"  {silent} silent" if silent else "")]
    for each in at_work:
        seen = f"silent for {each.seen_ago_s:.0f} s" if each.silent else f"seen {each.seen_ago_s:.1f} s ago"
        lines.append(f"  {each.owner}  version {each.version}  broker {each.broker}  {seen}")
    return lines


def _pauses(paused: list[Pause]) -> list[str]:
    lines = [f"paused         {len(paused) or 'nothing'}"]
    for each in paused:
        unfinished = "  resuming; if that was interrupted, run resume again" if each.resuming else ""
        lines.append(f"  {each.topics}  for {each.paused_for_s:.0f} s{unfinished}")
    return lines
