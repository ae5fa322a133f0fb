"""Opens engines for our own processes, and tells a database that is away from one that says no."""

from __future__ import annotations

import sqlite3
from typing import Any

import sqlalchemy as sa
from sqlalchemy import event
from sqlalchemy.exc import ArgumentError, DBAPIError, NoSuchModuleError

from outbox import urls
from outbox.errors import ConfigurationError, DatabaseUnavailable

SUPPORTED = ("postgresql", "sqlite")
_OURS = {"postgresql": "use postgresql+psycopg://", "sqlite": "use sqlite:///"}
_CONNECT_TIMEOUT_S = 5
# A dead host must not hang a relay: psycopg hands these to libpq.
_POSTGRESQL = {
    "connect_timeout": _CONNECT_TIMEOUT_S,
    "keepalives_idle": 10,
    "keepalives_interval": 5,
    "keepalives_count": 3,
    "tcp_user_timeout": 20_000,
}


def open_engine(url: str, *, application_name: str = "outbox-relay", pool_size: int = 2, pre_ping: bool = True) -> sa.Engine:
    """Return an engine for `url`, with READ COMMITTED and short connect timeouts. Does not connect.

    A PostgreSQL URL without a driver gets psycopg 3. What of it is in a file (see `outbox.urls`) is read again for each new
    connection. `pre_ping`: ask before each use whether a connection still works. Raises `ConfigurationError` for a URL that cannot work.
    """
    parsed = _parse(url)
    if parsed.get_backend_name() == "sqlite":
        return _sqlite(parsed)
    engine = sa.create_engine(
        parsed,
        isolation_level="READ COMMITTED",
        pool_size=pool_size,
        max_overflow=0,
        pool_pre_ping=pre_ping,
        connect_args=_patience(parsed, application_name),
    )
    if urls.is_in_a_file(url):
        _read_again(engine, url, application_name)
    return engine


def _read_again(engine: sa.Engine, url: str, application_name: str) -> None:
    @event.listens_for(engine, "do_connect")
    def read(dialect: Any, _record: Any, arguments: list[Any], named: dict[str, Any]) -> None:
        try:
            arguments[:], found = driver_arguments(url, application_name=application_name)
        except ConfigurationError as error:  # now it is an outage: the file may be back in a moment
            raise dialect.loaded_dbapi.OperationalError(str(error)) from error
        named.clear()
        named.update(found)


def driver_arguments(url: str, *, application_name: str) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return what to call `psycopg.connect` with, for a connection that no engine has, with the same short timeouts.

    Raises `ConfigurationError` for a URL that cannot work, or is not one of PostgreSQL.
    """
    parsed = _parse(url)
    if parsed.get_backend_name() != "postgresql":
        message = f"wake: 'postgres' needs a PostgreSQL database, not {parsed.get_backend_name()!r}; use udp:// or unix://"
        raise ConfigurationError(message)
    parsed = parsed.set(drivername="postgresql+psycopg")
    arguments, named = parsed.get_dialect()().create_connect_args(parsed)
    return tuple(arguments), {**_patience(parsed, application_name), **named}


def _patience(url: sa.URL, application_name: str) -> dict[str, Any]:
    known = {**_POSTGRESQL, "application_name": application_name}
    return {name: value for name, value in known.items() if name not in url.query}


def unavailable(error: DBAPIError) -> DatabaseUnavailable:
    """Return our error for a database that could not be reached, with the server's own first line and no password."""
    cause = str(error.orig).strip().partition("\n")[0]
    return DatabaseUnavailable(f"database: {cause}")


def _parse(url: str) -> sa.URL:
    text = urls.current(url)
    try:
        parsed = sa.make_url(text)
    except (ArgumentError, ValueError) as error:  # their text may hold a part of the password
        message = "the database URL cannot be read; expected postgresql+psycopg://user:password@host:5432/name"
        raise ConfigurationError(message) from error
    if parsed.drivername in ("postgresql", "postgres"):
        parsed = parsed.set(drivername="postgresql+psycopg")
    backend = parsed.get_backend_name()
    if backend not in SUPPORTED:
        message = f"database {backend!r} is not supported; use one of: {', '.join(SUPPORTED)}"
        raise ConfigurationError(message)
    try:
        dialect = parsed.get_dialect()
        dialect.import_dbapi()
    except (NoSuchModuleError, ImportError) as error:
        message = f"database driver {parsed.drivername!r} is unknown or not installed; {_OURS[backend]}"
        raise ConfigurationError(message) from error
    if dialect.is_async:
        message = f"database driver {parsed.drivername!r} is for asyncio, which this process does not use; {_OURS[backend]}"
        raise ConfigurationError(message)
    return parsed


def _sqlite(url: sa.URL) -> sa.Engine:
    engine = sa.create_engine(url, connect_args={"timeout": 30})

    @event.listens_for(engine, "connect")
    def prepare(connection: sqlite3.Connection, _record: Any) -> None:
        connection.isolation_level = None  # we say BEGIN ourselves, see below
        connection.execute("PRAGMA journal_mode = WAL")

    @event.listens_for(engine, "begin")
    def begin(connection: sa.Connection) -> None:
        # SQLite has no row locks: taking the write lock first is what makes a claim atomic there.
        connection.exec_driver_sql("BEGIN IMMEDIATE")

    return engine
