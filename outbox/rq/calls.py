"""Whether RQ's worker can make a call: the function by its name, its arguments as JSON."""

from __future__ import annotations

import inspect
import math
import re
import sys
from typing import TYPE_CHECKING, Any

from outbox.errors import InvalidEvent

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

_DOTTED = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)+")


def function_name(func: Callable[..., Any] | str) -> str:
    """Return the dotted name by which a worker imports a function. Raises `InvalidEvent` when it has none."""
    if isinstance(func, str):
        if not _DOTTED.fullmatch(func):
            raise InvalidEvent("func", f"{func!r} is no dotted name of a function, such as 'shop.mail.send_invoice'")
        return func
    module, name = getattr(func, "__module__", None), getattr(func, "__qualname__", None)
    if not module or not name or module == "__main__" or "<" in name or _found(module, name) is not func:
        raise InvalidEvent(
            "func",
            f"RQ's worker could not import {func!r}; pass a function that a module has under its own name, or its dotted name",
        )
    return f"{module}.{name}"


def check_call(func: Callable[..., Any] | str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Raise `InvalidEvent` when a function does not take these arguments; of a name nothing is known."""
    if isinstance(func, str):
        return
    try:
        signature = inspect.signature(func)
    except (TypeError, ValueError):  # some that are written in C have none
        return
    try:
        signature.bind(*args, **kwargs)
    except TypeError as error:
        raise InvalidEvent("func", f"{func.__qualname__}{signature} cannot be called so: {error}") from error


def check_json(where: str, value: object) -> None:
    """Raise `InvalidEvent` unless a value comes out of JSON as it went in."""
    try:
        _check(where, value)
    except RecursionError as error:
        raise InvalidEvent(where, "is nested too deeply for JSON") from error


def _check(where: str, value: object) -> None:
    if value is None or isinstance(value, bool | int | str):
        return
    if isinstance(value, float):
        if not math.isfinite(value):
            raise InvalidEvent(where, f"is {value}, which JSON has no form for")
    elif isinstance(value, list):
        for number, each in enumerate(value):
            _check(f"{where}[{number}]", each)
    elif isinstance(value, dict):
        for name, each in value.items():
            if not isinstance(name, str):
                raise InvalidEvent(where, f"has the key {name!r}, which would arrive as a str; use str keys")
            _check(f"{where}[{name!r}]", each)
    else:
        raise InvalidEvent(
            where,
            f"is of type {type(value).__name__}, which would not arrive as such; pass None, a bool, a number, a str, "
            "or a list or dict of these (an id instead of an object, text instead of a Decimal or datetime)",
        )


def _found(module: str, name: str) -> Any:
    found: Any = sys.modules.get(module)
    for part in name.split("."):
        found = getattr(found, part, None)
    return found
