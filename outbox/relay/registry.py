"""Tells the database that this relay is at work, for those who look at `outbox-relay status`."""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING

from sqlalchemy.exc import OperationalError, SQLAlchemyError

from outbox import __version__
from outbox.store import registry
from outbox.store.dialects import limit_statements

if TYPE_CHECKING:
    from collections.abc import Callable

    import sqlalchemy as sa

    from outbox.store.registry import Broker
    from outbox.tables import Tables

log = logging.getLogger("outbox.relay")

EVERY_S = 10.0
_STATEMENT_LIMIT_S = 5.0


class Registry:
    """Keeps the relay's row in `outbox_relay`: every ten seconds, and at once when the broker's state has changed.

    Only people read that row, so no error of the database gets out of here: the relay's own work will meet it soon enough.
    """

    def __init__(self, engine: sa.Engine, tables: Tables, *, owner: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._engine = engine
        self._tables = tables
        self._owner = owner
        self._clock = clock
        self._broker: Broker | None = None
        self._due_at = 0.0
        self._failing = False

    def note(self, broker: Broker) -> None:
        """Note that the relay is at work and how it finds the broker. Called often; mostly compares two numbers."""
        if broker is self._broker and self._clock() < self._due_at:
            return
        self._broker = broker
        self._write(lambda connection: self._note(connection, broker))
        self._due_at = self._clock() + EVERY_S  # also after an error: a database that is away need not be asked more often

    def leave(self) -> None:
        """Take the relay out, when it stops in order."""
        self._write(lambda connection: registry.leave(connection, self._tables, owner=self._owner))

    def _note(self, connection: sa.Connection, broker: Broker) -> None:
        registry.note(connection, self._tables, owner=self._owner, version=__version__, broker=broker)

    def _write(self, statements: Callable[[sa.Connection], None]) -> None:
        try:
            with self._engine.begin() as connection:
                limit_statements(connection, _STATEMENT_LIMIT_S)
                statements(connection)
        except SQLAlchemyError as error:
            if not self._failing:
                # Of a database that is away the relay's own work speaks; not of a right that is missing on this table.
                level = logging.DEBUG if isinstance(error, OperationalError) else logging.WARNING
                log.log(level, "relay not registered", extra={"error": str(error).partition("\n")[0]})
            self._failing = True
        else:
            self._failing = False
