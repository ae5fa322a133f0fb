"""The inbox that a command works on: imported from the application, and used with its own sessions."""

from __future__ import annotations

import importlib
import sys
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from outbox.cli.reading import explained
from outbox.errors import ConfigurationError
from outbox.inbox.inbox import Inbox
from outbox.inbox.processing import processing

if TYPE_CHECKING:
    from collections.abc import Iterator

    from outbox.inbox.processing import Run

argument = click.argument("path", metavar="MODULE:INBOX")


@contextmanager
def working(path: str) -> Iterator[tuple[Inbox, Run]]:
    """Give an inbox, and a way to call functions that use its transactions, also those of an `async_sessionmaker`.

    Raises `ConfigurationError` when it is not an inbox, `DatabaseUnavailable`, or `SchemaError` if the tables are not there.
    """
    inbox = find_inbox(path)
    with explained(), processing(inbox) as run:
        yield inbox, run


def find_inbox(path: str) -> Inbox:
    """Import `module:attribute`, from the current folder too. Raises `ConfigurationError` when it is not an `Inbox`."""
    module, _, attribute = path.partition(":")
    if not module or not attribute:
        raise ConfigurationError(f"{path!r} does not name an inbox; write MODULE:INBOX, such as shop.shipping:inbox")
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    found: Any = _import(module)
    for name in attribute.split("."):
        found = getattr(found, name, None)
    if not isinstance(found, Inbox):
        raise ConfigurationError(f"{path!r} is no outbox.Inbox but {found!r:.80}; check the name after the colon")
    return found


def _import(module: str) -> Any:
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module}.".startswith(f"{error.name}."):
            raise  # the module is there, and something that it imports is not
        raise ConfigurationError(f"there is no module {error.name!r} here ({Path.cwd()}) or on the import path") from error
