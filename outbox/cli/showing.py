"""A command that prints the configuration of another command, and says whether it can work."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from outbox.cli import config, options
from outbox.cli.exit import Command
from outbox.cli.hiding import hidden
from outbox.cli.printing import printable
from outbox.errors import OutboxError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

_UNSET = getattr(click.core, "UNSET", None)  # what click itself turns into None once all parameters are there
_VALUES = "outbox.values"
FIRST_ERROR = "outbox.first_error"
"""Where the context has the first parameter's error."""


@dataclass(frozen=True, slots=True)
class Value:
    """One value of a configuration as it was written, without secrets; `source` says where it came from."""

    name: str
    value: Any
    source: str


class Showing(Command):
    """Takes the parameters of another command, whatever they are, and notes each with where it came from.

    An error in one of them is kept until all have been looked at.
    """

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Take the parameters one by one."""
        found, args, order = self.make_parser(ctx).parse_args(args=args)
        ctx.meta[_VALUES] = values = {}
        for param in click.core.iter_params_for_processing(order, self.get_params(ctx)):
            try:
                _, args = param.handle_parse_result(ctx, found, args)
            except (click.UsageError, OutboxError) as error:
                ctx.meta.setdefault(FIRST_ERROR, error)
                ctx.params.setdefault(str(param.name), None)
            values[param.name] = _value(ctx, param, found)
        ctx.params.update({name: None for name, value in ctx.params.items() if value is _UNSET})
        if args:
            ctx.meta.setdefault(FIRST_ERROR, click.UsageError(f"Got unexpected extra argument ({' '.join(args)})", ctx))
        return args


def show_command(
    of: click.Command,
    name: str,
    help_text: str,
    *,
    check: Callable[[click.Context], object],
    more: Callable[[click.Context], Mapping[str, Sequence[Mapping[str, Any]]]] = lambda _ctx: {},
) -> click.Command:
    """Return a command that prints every parameter of another one, and `more` tables, then raises what `check` raises."""

    def show(as_json: bool, **_params: Any) -> None:
        ctx = click.get_current_context()
        error = ctx.meta.get(FIRST_ERROR) or _error_of(check, ctx)
        values = [ctx.meta[_VALUES][param.name] for param in of.params]
        _print(values, more(ctx), error, as_json=as_json)
        if error is not None:
            raise error

    command = Showing(name, params=list(of.params), callback=show, help=help_text, short_help=help_text.partition(".")[0] + ".")
    return options.as_json(command)


def _value(ctx: click.Context, param: click.Parameter, found: Mapping[str, Any]) -> Value:
    name = str(param.name)
    written, source = param.consume_value(ctx, found)
    shown = written if written is None or isinstance(written, bool | int | float) else hidden(name, str(written))
    known = isinstance(written, bool | int | float | str | Path)
    return Value(name, shown if known else None, _said(ctx, param, source) if known else "not set")


def _said(ctx: click.Context, param: click.Parameter, source: ParameterSource) -> str:
    if source is ParameterSource.ENVIRONMENT:
        return f"environment {param.envvar}"
    if source is ParameterSource.DEFAULT_MAP:
        return f"file {ctx.meta[config.FILE]}"
    return "command line" if source is ParameterSource.COMMANDLINE else "default"


def _error_of(check: Callable[[click.Context], object], ctx: click.Context) -> Exception | None:
    try:
        check(ctx)
    except (click.UsageError, OutboxError) as error:
        return error
    return None


def _print(
    values: list[Value], more: Mapping[str, Sequence[Mapping[str, Any]]], error: Exception | None, *, as_json: bool
) -> None:
    if as_json:
        said = None if error is None else _text(error)
        click.echo(json.dumps({"options": [asdict(each) for each in values], **more, "error": said}))
        return
    rows = [(each.name, "-" if each.value is None else _text_of(each.value), each.source) for each in values]
    widths = [max(len(row[place]) for row in rows) for place in (0, 1)]
    for name, value, source in rows:
        click.echo(f"{name:<{widths[0]}}  {value:<{widths[1]}}  {source}".rstrip())
    for title, tables in more.items():
        for table in tables:
            click.echo(f"{title}: " + "  ".join(f"{name} = {_text_of(value)}" for name, value in table.items()))


def _text_of(value: Any) -> str:
    return printable(value if isinstance(value, str) else json.dumps(value, default=str))


def _text(error: Exception) -> str:
    return error.format_message() if isinstance(error, click.ClickException) else str(error)
