"""Lets our own programs read a command line, without running it."""

import os
from collections.abc import Mapping, Sequence
from typing import Any
from unittest import mock

import click

from outbox.cli import main as relay
from outbox.cli.consume import main as consume

PROGRAMS: dict[str, click.Command] = {"outbox-relay": relay, "outbox-consume": consume}


def parameters(command: Sequence[str], variables: Mapping[str, str] | None = None) -> dict[str, Any]:
    """Return what a command would be called with. Raises click's own errors for what it does not know."""
    program, *arguments = command
    reached: list[click.Context] = []
    others = {name: value for name, value in os.environ.items() if not name.startswith("OUTBOX_")}
    with (
        mock.patch.dict(os.environ, {**others, **(variables or {})}, clear=True),
        mock.patch.object(click.Context, "invoke", autospec=True, side_effect=lambda context, *_, **__: reached.append(context)),
    ):
        PROGRAMS[program].main(arguments, prog_name=program, standalone_mode=False)
    return reached[-1].params
