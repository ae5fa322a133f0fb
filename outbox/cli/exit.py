"""Exit codes, and how an error becomes one line on stderr and one of them."""

from __future__ import annotations

from typing import Any

import click

from outbox.cli import logs
from outbox.errors import BrokerUnavailable, ConfigurationError, DatabaseUnavailable, OutboxError, SchemaError
from outbox.inbox.errors import HandlersStuck

FAILURE = 1
USAGE = 2  # wrong option or configuration; click's own code for it
DATABASE = 3  # the database cannot be reached
BROKER = 4  # the broker refused us: credentials, virtual host, exchange
SCHEMA = 5  # the outbox tables are missing or older than needed
FOUND = 6  # `doctor` has found what somebody must do something about
STUCK = 6  # handlers hang past their time limits; the process must be started again
KILLED = 130  # a second signal stopped it at once

_CODES: tuple[tuple[type[OutboxError], int], ...] = (
    (ConfigurationError, USAGE),
    (DatabaseUnavailable, DATABASE),
    (BrokerUnavailable, BROKER),
    (SchemaError, SCHEMA),
    (HandlersStuck, STUCK),
)


def exit_code(error: OutboxError) -> int:
    """Return the exit code that stands for an error."""
    return next((code for kind, code in _CODES if isinstance(error, kind)), FAILURE)


class Command(click.Command):
    """A command in which every `OutboxError` becomes one message on stderr, and the exit code that stands for it."""

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command."""
        try:
            return super().invoke(ctx)
        except OutboxError as error:
            logs.last_words(error)
            ctx.exit(exit_code(error))


class Group(Command, click.Group):
    """A group of such commands."""
