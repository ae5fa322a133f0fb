"""The TOML file: the same names as the options, below whatever the command line and the environment say."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import click

from outbox.errors import ConfigurationError
from outbox.routes import Route, Routes

KNOWN = (
    "database_url", "broker_url", "schema", "lease", "confirm_timeout", "poll_interval", "batch_size", "grace",
    "max_attempts", "retry_first", "retry_ceiling", "allow_unconfirmed", "log_level", "routes",
)  # fmt: skip
_ROUTES = "outbox.routes"


def read(path: Path) -> dict[str, Any]:
    """Return the settings in a file. Raises `ConfigurationError` for what it cannot read or does not know."""
    try:
        settings = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        message = f"{path}: {error.strerror}"
        raise ConfigurationError(message) from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        message = f"{path}: not valid TOML: {error}"
        raise ConfigurationError(message) from error
    unknown = sorted(set(settings) - set(KNOWN))
    if unknown:
        message = f"{path}: unknown option {', '.join(unknown)}; known are: {', '.join(KNOWN)}"
        raise ConfigurationError(message)
    return settings


def routes(listed: Any) -> Routes:
    """Return the routes that the `[[routes]]` tables of a file describe."""
    if not isinstance(listed, list) or not all(isinstance(each, dict) for each in listed):
        message = "routes: write one [[routes]] table for each route"
        raise ConfigurationError(message)
    try:
        return Routes(tuple(Route(**each) for each in listed))
    except TypeError as error:
        message = f"routes: {str(error).removeprefix('Route.__init__() ')}; known are: {', '.join(Route.__dataclass_fields__)}"
        raise ConfigurationError(message) from error


def _load(ctx: click.Context, _param: click.Parameter, path: Path | None) -> Path | None:
    if path is not None:
        settings = read(path)
        ctx.meta[_ROUTES] = routes(settings.pop("routes", []))
        ctx.default_map = settings
    return path


def routes_of(ctx: click.Context) -> Routes:
    """Return the routes of the file that the command was given."""
    found = ctx.meta.get(_ROUTES)
    return found if isinstance(found, Routes) else Routes()


option = click.option(
    "--config",
    type=click.Path(path_type=Path, dir_okay=False),
    envvar="OUTBOX_CONFIG",
    show_envvar=True,
    is_eager=True,
    expose_value=False,
    callback=_load,
    metavar="FILE",
    help="A TOML file with the same options (database_url = ...) and [[routes]].",
)
