"""`outbox-relay messages`: look at single messages."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any
from uuid import UUID

import click

from outbox.cli import config, options
from outbox.cli.exit import Command, Group
from outbox.cli.printing import page, plain, printable
from outbox.cli.reading import reading
from outbox.errors import OutboxError
from outbox.states import State
from outbox.store.messages import find, get
from outbox.tables import Tables

if TYPE_CHECKING:
    from collections.abc import Mapping

_LINES = "\n\t"


@click.group(cls=Group)
def messages() -> None:
    """Look at messages in the outbox."""


@messages.command("list", cls=Command)
@config.option
@options.database_url
@options.schema
@click.option("--state", type=click.Choice([state.value for state in State]), help="Only messages in this state.")
@click.option("--topic", help="Only messages of this topic.")
@click.option("--key", help="Only messages of this key.")
@click.option(
    "--after",
    type=click.IntRange(0, 2**63 - 1),
    default=0,
    metavar="ID",
    help="Only messages with a higher id, for the next page.",
)
@click.option("--limit", type=click.IntRange(1, 10_000), default=50, show_default=True, help="At most so many.")
@options.as_json
def list_messages(
    *,
    database_url: str,
    schema: str | None,
    state: str | None,
    topic: str | None,
    key: str | None,
    after: int,
    limit: int,
    as_json: bool,
) -> None:
    """List messages, the oldest first, without their payloads. With --json one object on each line.

    Example: outbox-relay messages list --state dead --topic orders.placed
    """
    with reading(database_url) as connection:
        rows = find(
            connection,
            Tables(schema=schema),
            state=State(state) if state else None,
            topic=topic,
            key=key,
            after=after,
            limit=limit,
        )
    for row in rows:
        click.echo(json.dumps(plain(row)) if as_json else _line(row))
    if not rows and not as_json:
        click.echo("no messages", err=True)


@messages.command(cls=Command)
@config.option
@options.database_url
@options.schema
@click.argument("message_id", type=click.UUID)
@options.as_json
def show(*, database_url: str, schema: str | None, message_id: UUID, as_json: bool) -> None:
    """Show one message with its headers and payload.

    A message that was published is deleted, so it is not here any more.

    Example: outbox-relay messages show 0198c5a7-6b1e-7c3f-8a53-0f5d5f9d2b11
    """
    with reading(database_url) as connection:
        row = get(connection, Tables(schema=schema), message_id)
    if row is None:
        message = f"no message {message_id}: it was never committed, or it has been published and deleted"
        raise OutboxError(message)
    found = plain(row)
    click.echo(json.dumps(found) if as_json else page(found))


def _line(row: Mapping[str, Any]) -> str:
    error = f"  {printable(row['last_error'])}" if row["last_error"] else ""
    key = f"  key {printable(row['key'])}" if row["key"] is not None else ""
    created = row["created_at"].isoformat(timespec="seconds")
    return f"{row['id']:>8}  {row['message_id']}  {row['state']:<9}  {created}  {row['topic']}{key}  attempts {row['attempts']}{error}"
