"""A relay's presence: others learn at once when its process is gone, and do not wait for its leases to run out.

A process that is killed loses its connections, and with the session ends the lock. That is all that others rely on to take leases over
early, and only as far as these hold; otherwise the lease's time decides, as it does without a lock:

- The lock is held before its number is written into a lease, and a number is never used again (`store.presence`).
- The session is ours from end to end, so neither a pooler ends it before us, nor keeps it after us.
- A session can end while its process lives: an administrator ends it, or the server restarts. So before messages are sent we look whether
  ours has, and send nothing more of what we had claimed. Others take over only what they have found free twice, `GRACE_S` apart.
- When the server was restarted all sessions have ended, and each relay is to settle first what it has in hand. So whoever
  has just got its session judges nobody for `SETTLE_S`.

Whoever is taken over in spite of that, because the network has kept the end of its session from it, publishes messages that are published
twice. It writes nothing: the tokens of its leases are no longer those in the table.
"""

from __future__ import annotations

import logging
import math
import secrets
import selectors
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from sqlalchemy.exc import SQLAlchemyError

from outbox import clock
from outbox.store import presence

if TYPE_CHECKING:
    import sqlalchemy as sa

    from outbox.tables import Tables

log = logging.getLogger("outbox.relay")

LOOK_EVERY_S = 1.0
GRACE_S = 0.3
SETTLE_S = 10.0
_RETRY_S = 10.0
_CHECK_EVERY_S = 0.01  # far below the grace, and then it costs a message nothing


class Presence:
    """One relay's lock, and what it knows of the others'. Not thread safe. `engine` is one that opens sessions for this alone."""

    def __init__(self, engine: sa.Engine, tables: Tables, *, owner: str) -> None:
        self._engine = engine
        self._tables = tables
        self._owner = self.name = owner
        self._session: sa.Connection | None = None
        self._selector: selectors.BaseSelector | None = None
        self._lost = False
        self._possible = engine.dialect.name == "postgresql"
        self._due_at = self._since = self._look_at = self._checked_at = 0.0
        self._first_found: dict[str, float] = {}
        self._gone: frozenset[str] = frozenset()

    def renew(self) -> str:
        """Get a new session if ours has ended; return the name for what is claimed next. To be called with nothing in hand."""
        if self._session is not None and self.intact():
            return self.name
        self._lost = False
        if self._possible and clock.seconds() >= self._due_at:
            self._due_at = clock.seconds() + _RETRY_S
            try:
                self._open()
            except SQLAlchemyError as error:  # the relay's own work will meet it; without a lock the lease's time decides
                log.debug("no session for the relay's lock", extra={"error": str(error).partition("\n")[0]})
                self.close()
        return self.name

    def intact(self) -> bool:
        """Tell whether what was claimed under this name is still ours, as far as the lock goes. Called before each message."""
        if self._session is None or self._selector is None:
            return not self._lost
        now = clock.seconds()
        if now - self._checked_at < _CHECK_EVERY_S:
            return True
        self._checked_at = now
        if not self._selector.select(0):
            return True
        driver: Any = self._session.connection.driver_connection
        with suppress(self._session.dialect.dbapi.Error):  # type: ignore[union-attr]  # it has connected
            driver.pgconn.consume_input()  # a notice, or the end
            return True
        log.warning("the session of the relay's lock has ended; what is in hand is left to whoever claims it next")
        self.close()
        self._lost = True
        return False

    def gone(self, connection: sa.Connection) -> frozenset[str]:
        """Return the names of those whose leases need not be waited for; `connection` is in a transaction of the claim."""
        now = clock.seconds()
        if self._session is None or now - self._since < SETTLE_S:
            return frozenset()
        if now >= self._look_at:
            found = presence.gone(connection, self._tables, but=self.name)
            self._first_found = {name: self._first_found.get(name, now) for name in found}
            sure = frozenset(name for name, first in self._first_found.items() if now - first >= GRACE_S)
            for name in sure - self._gone:
                log.warning("a relay's process is gone; its leases are taken over", extra={"gone": name})
            self._gone = sure
            self._look_at = now + (GRACE_S if found else LOOK_EVERY_S)
        return self._gone

    @property
    def wait_s(self) -> float:
        """How long the next claim can wait: only for the grace while somebody seems to be gone."""
        return math.inf if self._gone == self._first_found.keys() else GRACE_S

    def close(self) -> None:
        """End the session, and with it the lock."""
        session, self._session, self.name = self._session, None, self._owner
        if self._selector is not None:
            self._selector.close()
            self._selector = None
        if session is not None:
            _end(session)

    def _open(self) -> None:
        session = self._engine.connect().execution_options(isolation_level="AUTOCOMMIT")
        driver: Any = session.connection.driver_connection
        number = secrets.randbits(63)
        if not hasattr(driver, "pgconn") or not presence.is_own_session(session):
            self._possible = False
            _end(session)
            log.info("no lock for this relay: a pooler is between it and the database; when it is killed, its leases run out")
            return
        self._session, self._selector = session, selectors.DefaultSelector()
        self._selector.register(driver.fileno(), selectors.EVENT_READ)
        if presence.hold(session, number):
            self.name, self._since = presence.named(self._owner, number), clock.seconds()
            self._first_found, self._gone = {}, frozenset()
        else:
            self.close()


def _end(session: sa.Connection) -> None:
    """Close it for good, not into the pool."""
    with suppress(SQLAlchemyError):
        session.invalidate()
    session.close()
