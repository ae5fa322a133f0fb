"""The TOML file: the same names as the options, below whatever the command line and the environment say."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import click

from outbox.backoff import Backoff
from outbox.cli.types import DURATION, WholeNumber
from outbox.errors import ConfigurationError
from outbox.policies import Policies
from outbox.routes import Route, Routes
from outbox.states import OnDead, RetryPolicy
from outbox.topics import is_pattern
from outbox.wire import Format

FILE = "outbox.config"
"""Where a command's context has the file that it was given."""

_TABLES = ("routes", "policies")
_POLICY = ("topics", "max_attempts", "retry_first", "retry_ceiling", "max_age", "on_dead")


def read(path: Path) -> dict[str, Any]:
    """Return the settings in a file. Raises `ConfigurationError` for what it cannot read or does not know."""
    settings = _parse(path)
    _refuse_unknown(path, settings)
    return settings


def _parse(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        message = f"{path}: {error.strerror}"
        raise ConfigurationError(message) from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        message = f"{path}: not valid TOML: {error}"
        raise ConfigurationError(message) from error


def _refuse_unknown(path: Path, settings: dict[str, Any]) -> None:
    known = _known()
    unknown = sorted(set(settings) - set(known))
    if unknown:
        message = f"{path}: unknown option {', '.join(unknown)}; known are: {', '.join(known)}"
        raise ConfigurationError(message)


def _known() -> tuple[str, ...]:
    """Return the names of everything that a file may hold, whichever command reads it: the relay's own options, and doctor's one."""
    from outbox.cli.run import run  # which takes its options from here

    return (*(str(each.name) for each in run.params if each.name != "config"), "management_url", *_TABLES)


def routes(listed: Any) -> tuple[Route, ...]:
    """Return the routes that the `[[routes]]` tables of a file describe."""
    return tuple(_route(each) for each in _tables("routes", "route", listed))


def _route(table: dict[str, Any]) -> Route:
    known = Route.__dataclass_fields__
    unknown = sorted(set(table) - set(known))
    if unknown or "topics" not in table:
        problem = f"unknown {', '.join(unknown)}" if unknown else "topics is missing"
        message = f"routes: {problem}; known are: {', '.join(known)}"
        raise ConfigurationError(message)
    return Route(**table)


def policies(listed: Any, default: RetryPolicy) -> Policies:
    """Return the policies that the `[[policies]]` tables of a file describe; what one leaves out is as in `default`."""
    return Policies(default, tuple(_policy(each, default) for each in _tables("policies", "topic pattern", listed)))


def _policy(table: dict[str, Any], default: RetryPolicy) -> tuple[str, RetryPolicy]:
    topics = table.get("topics")
    unknown = sorted(set(table) - set(_POLICY))
    if unknown or not isinstance(topics, str) or not is_pattern(topics):
        problem = f"unknown {', '.join(unknown)}" if unknown else f"topics is {topics!r}; write a topic pattern"
        message = f"policies: {problem}; known are: {', '.join(_POLICY)}"
        raise ConfigurationError(message)
    try:
        return topics, RetryPolicy(
            max_attempts=_value(table, "max_attempts", WholeNumber(1), default.max_attempts),
            backoff=Backoff(
                first_s=_value(table, "retry_first", DURATION, default.backoff.first_s),
                ceiling_s=_value(table, "retry_ceiling", DURATION, default.backoff.ceiling_s),
            ),
            max_age_s=_value(table, "max_age", DURATION, default.max_age_s),
            on_dead=OnDead(_value(table, "on_dead", click.Choice([each.value for each in OnDead]), default.on_dead)),
        )
    except ConfigurationError as error:
        raise ConfigurationError(f"policies: topics = {topics!r}: {error}") from error


def _value(policy: dict[str, Any], name: str, kind: click.ParamType[Any], default: Any) -> Any:
    if name not in policy:
        return default
    try:
        return kind(policy[name])
    except click.BadParameter as error:
        raise ConfigurationError(f"{name}: {error.message}") from error


def _tables(name: str, one: str, listed: Any) -> list[dict[str, Any]]:
    if not isinstance(listed, list) or not all(isinstance(each, dict) for each in listed):
        message = f"{name}: write one [[{name}]] table for each {one}"
        raise ConfigurationError(message)
    return listed


def _load(ctx: click.Context, _param: click.Parameter, path: Path | None) -> Path | None:
    if path is not None:
        settings = _parse(path)
        ctx.meta[FILE] = path
        ctx.meta.update({f"outbox.{name}": settings[name] for name in _TABLES if name in settings})
        ctx.default_map = {name: value for name, value in settings.items() if name not in _TABLES}
        _refuse_unknown(path, settings)
        routes(ctx.meta.get("outbox.routes", []))
        policies_of(ctx, RetryPolicy())  # what is wrong with them is said now, by every command
    return path


def written(ctx: click.Context) -> dict[str, Any]:
    """Return the tables of the file as they were written, whether they can work or not."""
    return {name: ctx.meta[f"outbox.{name}"] for name in _TABLES if f"outbox.{name}" in ctx.meta}


def routes_of(ctx: click.Context, *, form: Format, source: str | None) -> Routes:
    """Return the routes of the file that the command was given, and as what messages are published if a route does not say."""
    return Routes(routes(ctx.meta.get("outbox.routes", [])), format=form, source=source or "")


def policies_of(ctx: click.Context, default: RetryPolicy) -> Policies:
    """Return the policies of the file that the command was given."""
    return policies(ctx.meta.get("outbox.policies", []), default)


option = click.option(
    "--config",
    type=click.Path(path_type=Path, dir_okay=False),
    envvar="OUTBOX_CONFIG",
    show_envvar=True,
    is_eager=True,
    expose_value=False,
    callback=_load,
    metavar="FILE",
    help="A TOML file with the same options (database_url = ...) [[routes]] and [[policies]].",
)
