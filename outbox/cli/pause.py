"""`outbox-relay pause` and `resume`: hold topics back, and let them go again."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import click

from outbox.cli import config, options
from outbox.cli.exit import Command
from outbox.cli.reading import database
from outbox.errors import OutboxError
from outbox.relay.resuming import Resume
from outbox.store import pauses
from outbox.tables import Tables
from outbox.topics import is_pattern

if TYPE_CHECKING:
    import sqlalchemy as sa


class Pattern(click.ParamType[str]):
    """A topic, or a pattern of topics."""

    name = "topics"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """Return the pattern as it is."""
        if not is_pattern(value):
            self.fail(f"{value!r} is no pattern of topics; write e.g. orders.placed, 'orders.*' or '#'", param, ctx)
        return str(value)


_topics = click.argument("topics", type=Pattern())


@click.command(cls=Command)
@config.option
@options.database_url
@options.schema
@_topics
def pause(*, database_url: str, schema: str | None, topics: str) -> None:
    """Publish nothing more of some topics, until they are resumed.

    TOPICS is a topic or a pattern: * is one word, # any number of words; quote it. Applications go on enqueueing. Later
    messages of a key wait behind a paused one, in whatever topic they are, so the order per key holds. What a relay has
    claimed before still goes out.

    Example: outbox-relay pause 'orders.*'
    """
    tables = Tables(schema=schema)
    with database(database_url) as engine, engine.begin() as connection:
        new = pauses.add(connection, tables, topics)
    click.echo(f"{topics}: paused" if new else f"{topics}: was paused already")


@click.command(cls=Command)
@config.option
@options.database_url
@options.schema
@_topics
def resume(*, database_url: str, schema: str | None, topics: str) -> None:
    """Publish paused topics again, with all that has gathered, in order per key.

    TOPICS is written as it was paused; `status` lists what is. Goes on in short transactions beside the relays; when it is
    interrupted, run it again. Exit code 1 when there is no such pause.

    Example: outbox-relay resume 'orders.*'
    """
    tables = Tables(schema=schema)
    with database(database_url) as engine:
        resumption = Resume(engine, tables, topics)
        if not resumption.begin():
            raise OutboxError(f"{topics}: is not paused; {_others(engine, tables)}")
        released = _released(resumption)
        if not resumption.finish() and topics in _active(engine, tables):
            raise OutboxError(f"{topics}: was paused again meanwhile, and stays so")
    click.echo(f"{topics}: resumed, {released} messages let go")


def _released(resumption: Resume) -> int:
    if not sys.stderr.isatty():
        return sum(resumption.steps())
    released = 0
    with click.progressbar(length=resumption.total, label="resuming", show_pos=True, file=sys.stderr) as bar:
        for number in resumption.steps():
            released += number
            bar.update(number)
    return released


def _others(engine: sa.Engine, tables: Tables) -> str:
    found = _active(engine, tables)
    return f"paused: {', '.join(found)}" if found else "nothing is"


def _active(engine: sa.Engine, tables: Tables) -> list[str]:
    with engine.connect() as connection:
        return sorted(pauses.active(connection, tables))
