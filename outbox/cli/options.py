"""Options that several commands share, each also taken from the environment."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click
from click.core import ParameterSource

from outbox import urls
from outbox.cli.types import ADDRESS

if TYPE_CHECKING:
    from collections.abc import Callable

Function = TypeVar("Function", bound="Callable[..., Any]")

_FIRST = (ParameterSource.COMMANDLINE, ParameterSource.ENVIRONMENT, ParameterSource.DEFAULT_MAP, ParameterSource.DEFAULT)


def setting(name: str, help_text: str, **more: Any) -> Callable[[Function], Function]:
    """Return an option `--some-name` that is also the environment variable `OUTBOX_SOME_NAME`."""
    variable = "OUTBOX_" + name.removeprefix("--").replace("-", "_").upper()
    return click.option(name, envvar=variable, show_envvar=True, show_default=True, help=help_text, **more)


def url(name: str, help_text: str, *, required: bool = True) -> Callable[[Function], Function]:
    """Return an option for a URL, and another one, `--some-url-file`, for a file that it is in."""

    def choose(ctx: click.Context, param: click.Parameter, value: str | None) -> str | None:
        return _of_two(ctx, param, value, required=required)

    def options(function: Function) -> Function:
        text = f"A file with {name} in it, such as a mounted secret; read again whenever a connection is made."
        kind = click.Path(path_type=Path)
        file = setting(f"{name}-file", text, type=kind, metavar="FILE", is_eager=True, expose_value=False, callback=_remember)
        return setting(name, help_text, metavar="URL", callback=choose)(file(function))

    return options


def _remember(ctx: click.Context, param: click.Parameter, path: Path | None) -> Path | None:
    ctx.meta[f"outbox.{param.name}"] = path
    return path


def _of_two(ctx: click.Context, param: click.Parameter, value: str | None, *, required: bool) -> str | None:
    """Return the URL, or the one that stands for its file, whichever was said in the place that comes first."""
    name = str(param.name)
    path = ctx.meta.get(f"outbox.{name}_file")
    places = [_FIRST.index(ctx.get_parameter_source(each) or ParameterSource.DEFAULT) for each in (name, f"{name}_file")]
    if value is not None and path is not None and places[0] == places[1]:
        raise click.UsageError(f"give {param.opts[0]} or {param.opts[0]}-file, not both", ctx=ctx)
    if path is not None and (value is None or places[1] < places[0]):
        return urls.of_file(path)
    if value is None and required:
        raise click.MissingParameter(ctx=ctx, param=param)
    return value


database_url = url(
    "--database-url", "Where the outbox tables are, e.g. postgresql+psycopg://app@db/shop. This or its file is needed."
)
schema = setting("--schema", "The database schema that holds the tables (default: the connection's own).", metavar="NAME")
broker_url = url(
    "--broker-url",
    "The broker, as kombu writes it, e.g. amqps://user:password@host:5671/vhost. This or its file is needed.",
)


def broker_tls(function: Function) -> Function:
    """Add the options for TLS to a broker."""
    _file = click.Path(exists=True, dir_okay=False)
    ca = setting("--broker-ca", "With TLS, the authorities to trust [default: those of the system].", type=_file, metavar="PEM")
    cert = setting("--broker-cert", "With TLS, our own certificate.", type=_file, metavar="PEM")
    key = setting(
        "--broker-key", "With TLS, the key of our certificate, if it is not in the same file.", type=_file, metavar="PEM"
    )
    return ca(cert(key(function)))


health = setting(
    "--health",
    "Answer /livez, /readyz, /startupz and /metrics over HTTP there, e.g. 127.0.0.1:8080; a bare port is on 127.0.0.1 [default: off].",
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
log_format = setting(
    "--log-format",
    "How: a line of text, or one JSON object a line.",
    type=click.Choice(["text", "json"], case_sensitive=False),
    default="text",
)
