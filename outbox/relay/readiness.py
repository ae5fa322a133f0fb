"""Whether the database could serve a relay now: reachable, and with the tables that it needs."""

from __future__ import annotations

import time
from contextlib import contextmanager
from typing import TYPE_CHECKING

from sqlalchemy.exc import DBAPIError

from outbox.migrations.verify import installed_version, require
from outbox.store.dialects import limit_statements
from outbox.store.engine import open_engine, unavailable
from outbox.tables import Tables

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import sqlalchemy as sa

    from outbox.settings import RelaySettings

VERIFY_EVERY_S = 60.0  # it takes 30 ms of processor time (m), the version alone 5
_STATEMENT_LIMIT_S = 2.0


class DatabaseCheck:
    """Asks for the tables' version at every call, and compares all of the schema when that has changed, and every minute."""

    def __init__(self, engine: sa.Engine, tables: Tables, *, seconds: Callable[[], float] = time.monotonic) -> None:
        self._engine = engine
        self._tables = tables
        self._seconds = seconds
        self._verified: int | None = None
        self._verified_at = 0.0

    def __call__(self) -> None:
        """Raise `DatabaseUnavailable` or `SchemaError` unless all is well."""
        try:
            with self._engine.connect() as connection:
                limit_statements(connection, _STATEMENT_LIMIT_S)
                self._check(connection)
        except DBAPIError as error:
            raise unavailable(error) from error

    def _check(self, connection: sa.Connection) -> None:
        now = self._seconds()
        if installed_version(connection, self._tables) != self._verified or now - self._verified_at > VERIFY_EVERY_S:
            self._verified = None
            self._verified = require(connection, self._tables)
            self._verified_at = now


@contextmanager
def database_check(settings: RelaySettings) -> Iterator[DatabaseCheck]:
    """Give the check of a relay's database, with one connection of its own that is opened at the first call.

    So a relay that hangs in the database does not keep it from asking. Raises `ConfigurationError` for a URL that cannot work.
    """
    engine = open_engine(settings.database_url, application_name="outbox-health", pool_size=1)
    try:
        yield DatabaseCheck(engine, Tables(schema=settings.schema))
    finally:
        engine.dispose()
