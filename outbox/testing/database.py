"""The database of an inbox, as the redelivery kit sees it: what is in it, and how to bring it back."""

from __future__ import annotations

import warnings
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import sqlalchemy as sa
from sqlalchemy.exc import DBAPIError, SAWarning
from sqlalchemy.pool import SingletonThreadPool, StaticPool

from outbox.errors import ConfigurationError
from outbox.store import snapshots

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from outbox.inbox import Inbox

    Contents = Mapping[sa.Table, Sequence[Mapping[str, Any]]]

_LOCK_WAIT_S = 5.0
_RESET = "give redeliver(reset=...), a function that brings the database to the state from which the handler starts"


class Database:
    """Reads and puts back the tables of some `MetaData` and of the inbox, through the bind of the inbox's sessions.

    A bind that is a `Connection`, as in a test that is rolled back, is used as it is, within savepoints.
    """

    def __init__(self, inbox: Inbox, metadata: Sequence[sa.MetaData]) -> None:
        self._tables = inbox.tables
        self._consumer = inbox.consumer
        self.bind = bind_of(inbox)
        self._pool = own_pool(self.bind)
        mine = [inbox.tables.message, inbox.tables.processed, inbox.tables.failed]
        self.tables = list(dict.fromkeys([*(table for each in metadata for table in _sorted(each, set(inbox.tables))), *mine]))

    @property
    def is_shared(self) -> bool:
        """Two deliveries can be at work at the same time, each on a connection of its own."""
        return isinstance(self.bind, sa.Engine) and self.bind.dialect.name == "postgresql"

    def read(self) -> Contents:
        """Return the contents of all tables."""
        with self._begin() as connection:
            return {table: snapshots.read(connection, table) for table in self.tables}

    def put_back(self, contents: Contents) -> None:
        """Bring the tables back to these contents; sequences go on. Raises `ConfigurationError` if the database refuses."""
        if self.read() != contents:
            self.rewrite(contents)

    def rewrite(self, contents: Contents) -> None:
        """Do so also where nothing has changed, to find out whether it is possible."""
        try:
            with self._begin() as connection:
                snapshots.put_back(connection, contents)
        except DBAPIError as error:
            cause = str(error.orig).strip().partition("\n")[0]
            raise ConfigurationError(f"the starting state cannot be put back ({cause}); {_RESET}") from error

    def expire_leases(self) -> None:
        """Let the time pass that a dead worker's lease would still hold others off."""
        with self._begin() as connection:
            snapshots.expire_leases(connection, self._tables, self._consumer)

    def lock_waiters(self) -> int:
        """Return how many sessions wait for a lock."""
        with self._begin() as connection:
            return snapshots.lock_waiters(connection)

    def cut_connections(self) -> None:
        """Close the connections that are idle, as the end of a process does."""
        if self._pool is not None and isinstance(self.bind, sa.Engine):
            replace_pool(self.bind, self.bind.pool.recreate())

    def give_back(self) -> None:
        """Close our own connections, and leave the engine as it was."""
        if self._pool is not None:
            replace_pool(self.bind, self._pool)

    @contextmanager
    def _begin(self) -> Iterator[sa.Connection]:
        try:
            with _transaction(self.bind) as connection:
                snapshots.limit_lock_waits(connection, _LOCK_WAIT_S)
                yield connection
        except DBAPIError as error:
            if getattr(error.orig, "sqlstate", None) == "55P03" or "database is locked" in str(error.orig):
                message = (
                    "another transaction holds locks on the tables; commit or close the test's own session before redeliver()"
                )
                raise ConfigurationError(message) from error
            raise


def bind_of(inbox: Inbox) -> sa.Engine | sa.Connection:
    """Return the engine or connection that the sessions of an inbox use for its tables."""
    made = inbox.sessions()
    session = getattr(made, "sync_session", made)
    bind: sa.Engine | sa.Connection = session.get_bind(mapper=inbox.tables.row, clause=inbox.tables.processed)
    return bind


def own_pool(bind: sa.Engine | sa.Connection) -> sa.Pool | None:
    """Let an engine use connections of its own, and return the pool with those of the test: they may be of another event loop.

    Returns None for what has one connection only: it stays in use.
    """
    if not isinstance(bind, sa.Engine) or isinstance(bind.pool, StaticPool | SingletonThreadPool):
        return None
    theirs, bind.pool = bind.pool, bind.pool.recreate()
    return theirs


def replace_pool(bind: Any, pool: sa.Pool) -> None:
    """Close the connections of an engine that are idle, and let it use another pool."""
    ours, bind.pool = bind.pool, pool
    ours.dispose()


@contextmanager
def _transaction(bind: sa.Engine | sa.Connection) -> Iterator[sa.Connection]:
    if isinstance(bind, sa.Engine):
        with bind.begin() as connection:
            yield connection
    else:
        with bind.begin_nested():
            yield bind


def _sorted(metadata: sa.MetaData, without: set[sa.Table]) -> list[sa.Table]:
    with warnings.catch_warnings():
        warnings.simplefilter("error", SAWarning)
        try:
            return [table for table in metadata.sorted_tables if table not in without]
        except SAWarning as error:
            raise ConfigurationError(f"the foreign keys of the tables form a circle ({error}); leave one of them out") from error
