"""Options that several commands share, each also taken from the environment."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

import click

from outbox.cli.types import ADDRESS

if TYPE_CHECKING:
    from collections.abc import Callable

Function = TypeVar("Function", bound="Callable[..., Any]")


def setting(name: str, help_text: str, **more: Any) -> Callable[[Function], Function]:
    """Return an option `--some-name` that is also the environment variable `OUTBOX_SOME_NAME`."""
    variable = "OUTBOX_" + name.removeprefix("--").replace("-", "_").upper()
    return click.option(name, envvar=variable, show_envvar=True, show_default=True, help=help_text, **more)


database_url = setting(
    "--database-url", "Where the outbox tables are, e.g. postgresql+psycopg://app@db/shop", required=True, metavar="URL"
)
schema = setting("--schema", "The database schema that holds the tables (default: the connection's own).", metavar="NAME")
broker_url = setting(
    "--broker-url", "The broker, as kombu writes it, e.g. amqp://user:password@host:5672/vhost", required=True, metavar="URL"
)
health = setting(
    "--health",
    "Answer /livez, /readyz and /startupz over HTTP there, e.g. 127.0.0.1:8080; a bare port is on 127.0.0.1 [default: off].",
    type=ADDRESS,
    metavar="HOST:PORT",
)
as_json = click.option("--json", "as_json", is_flag=True, help="Print JSON for machines instead of text.")
log_level = setting(
    "--log-level",
    "What to log on stderr.",
    type=click.Choice(["debug", "info", "warning", "error"], case_sensitive=False),
    default="info",
)
