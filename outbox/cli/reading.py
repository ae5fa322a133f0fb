"""Opens the database for the commands that look, and for those that change something."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

from sqlalchemy.exc import DBAPIError, OperationalError, ProgrammingError

from outbox.errors import SchemaError
from outbox.store.engine import open_engine, unavailable

if TYPE_CHECKING:
    from collections.abc import Iterator

    import sqlalchemy as sa


@contextmanager
def reading(url: str) -> Iterator[sa.Connection]:
    """Yield a connection. Raises `DatabaseUnavailable`, or `SchemaError` if the tables are not there."""
    with database(url) as engine, _connect(engine) as connection:
        yield connection


@contextmanager
def database(url: str) -> Iterator[sa.Engine]:
    """Yield an engine. Its errors come out as `DatabaseUnavailable`, or `SchemaError` if the tables are not there."""
    engine = open_engine(url)
    try:
        with explained():
            yield engine
    finally:
        engine.dispose()


@contextmanager
def explained() -> Iterator[None]:
    """Let a database's errors come out as `DatabaseUnavailable`, or `SchemaError` if the tables are not there."""
    try:
        yield
    except DBAPIError as error:
        if isinstance(error, ProgrammingError) or (isinstance(error, OperationalError) and "no such" in str(error.orig)):
            message = f"the outbox tables are not as expected ({_first_line(error)}); run: outbox-relay schema verify"
            raise SchemaError(message) from error
        raise unavailable(error) from error


def _connect(engine: sa.Engine) -> sa.Connection:
    try:
        return engine.connect()
    except DBAPIError as error:
        raise unavailable(error) from error


def _first_line(error: DBAPIError) -> str:
    return str(error.orig).partition("\n")[0]
