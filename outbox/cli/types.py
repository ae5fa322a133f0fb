"""Types of option values, from the command line as well as from a TOML file."""

from __future__ import annotations

import math
import re
from typing import Any

import click

_UNITS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86_400.0}
_ADDRESS = re.compile(r"(?:(?:\[(?P<v6>[0-9A-Fa-f:.]+)\]|(?P<host>[^\s:\[\]]+)):)?(?P<port>[0-9]{1,5})")
_LAST_PORT = 65_535
_DURATION = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s*(ms|s|m|h|d)?")


class Duration(click.ParamType[float]):
    """A time such as `500ms`, `30s`, `5m`, `2h` or `7d`, in seconds; a bare number is seconds."""

    name = "duration"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """Return seconds."""
        if isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < math.inf:
            return float(value)
        found = _DURATION.fullmatch(str(value).strip())
        if found is None:
            self.fail(f"{value!r} is not a time; write e.g. 500ms, 30s, 5m, 2h, 7d", param, ctx)
        return float(found[1]) * _UNITS[found[2] or "s"]


DURATION = Duration()


class Address(click.ParamType[tuple[str, int]]):
    """Where to listen: `HOST:PORT`, or a bare port, which is on 127.0.0.1. Port 0 is any that is free."""

    name = "address"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[str, int]:
        """Return host and port."""
        if isinstance(value, tuple):
            return value
        found = _ADDRESS.fullmatch(str(value).strip())
        if found is None or int(found["port"]) > _LAST_PORT:
            self.fail(f"{value!r} is no address; write e.g. 127.0.0.1:8080, 0.0.0.0:8080, [::]:8080", param, ctx)
        return found["v6"] or found["host"] or "127.0.0.1", int(found["port"])


ADDRESS = Address()


class WholeNumber(click.IntRange):
    """A whole number within bounds. `int()` would make 2 of 2.5, and 1 of `true`, which a TOML file can hold."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """Return the number."""
        if isinstance(value, bool | float):
            self.fail(f"{value!r} is not a whole number", param, ctx)
        return int(super().convert(value, param, ctx))
