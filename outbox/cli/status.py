"""`outbox-relay status`: one look at the outbox."""

from __future__ import annotations

import json
from dataclasses import asdict

import click

from outbox.cli import config, options
from outbox.cli.exit import Command
from outbox.cli.reading import reading
from outbox.identity import PARTITIONS
from outbox.store.stats import Stats, stats
from outbox.tables import Tables


@click.command(cls=Command)
@config.option
@options.database_url
@options.schema
@options.as_json
def status(*, database_url: str, schema: str | None, as_json: bool) -> None:
    """Show how many messages stand where, how old the oldest is, and which relays are at work.

    Example: outbox-relay status --database-url postgresql://app@db/shop --json
    """
    with reading(database_url) as connection:
        found = stats(connection, Tables(schema=schema))
    click.echo(json.dumps(asdict(found)) if as_json else _text(found))


def _text(found: Stats) -> str:
    counts = "  ".join(f"{state} {count}" for state, count in found.messages.items())
    oldest = "none" if found.oldest_unsent_s is None else f"{found.oldest_unsent_s:.1f} s"
    leased = sum(len(held.partitions) for held in found.leases)
    lines = [
        f"messages       {counts}",
        f"oldest unsent  {oldest}",
        f"totals         published {found.published}  failed tries {found.failed}",
        f"partitions     {leased} of {PARTITIONS} leased",
    ]
    for held in found.leases:
        listed = ", ".join(map(str, held.partitions))
        lines.append(f"  {held.owner}  partitions {listed}  expires in {held.expires_in_s:.1f} s")
    return "\n".join(lines)
