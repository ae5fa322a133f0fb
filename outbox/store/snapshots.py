"""Reads whole tables and puts them back, for tests alone: no relay and no consumer uses this."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import sqlalchemy as sa

from outbox.identity import PARTITIONS
from outbox.sqltypes import later

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from outbox.tables import Tables

    Row = Mapping[str, Any]


def read(connection: sa.Connection, table: sa.Table) -> list[dict[str, Any]]:
    """Return every row of a table, by the keys of its columns, in the order of its primary key."""
    query = sa.select(table).order_by(*table.primary_key.columns)
    return [{column.key: row[column] for column in table.columns} for row in connection.execute(query).mappings()]


def put_back(connection: sa.Connection, contents: Mapping[sa.Table, Sequence[Row]]) -> None:
    """Make tables hold exactly these rows; they are given in an order in which foreign keys can be satisfied."""
    for table in reversed(list(contents)):
        connection.execute(sa.delete(table))
    for table, rows in contents.items():
        for row in rows:
            connection.execute(sa.insert(table).values(_written(table, row)))


def _written(table: sa.Table, row: Row) -> dict[str, Any]:
    # A type like JSON would make something else of None.
    values = {column.key: row[column.key] for column in table.columns if column.computed is None}
    return {key: sa.null() if value is None else value for key, value in values.items()}


def limit_lock_waits(connection: sa.Connection, seconds: float) -> None:
    """Let no statement of this transaction wait longer for a lock (PostgreSQL; SQLite has its own timeout)."""
    if connection.dialect.name == "postgresql":
        connection.exec_driver_sql(f"SET LOCAL lock_timeout = {int(seconds * 1000)}")


def lock_waiters(connection: sa.Connection) -> int:
    """Return how many sessions of this database wait for a lock (PostgreSQL)."""
    query = "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'"
    return int(connection.exec_driver_sql(query).scalar_one())


def expire_leases(connection: sa.Connection, tables: Tables, consumer: str) -> int:
    """Let every lease that a consumer holds on a message be over; return how many."""
    processed = tables.processed
    held = sa.and_(processed.c.consumer == consumer, processed.c.state == "processing")
    return connection.execute(sa.update(processed).where(held).values(lease_until=later(sa.literal(-1.0, sa.Float)))).rowcount


def fill_partitions(connection: sa.Connection, tables: Tables) -> None:
    """Insert the partitions that are missing, as they are where the tables were made by `MetaData.create_all`."""
    partition = tables.partition.c.partition
    missing = set(range(PARTITIONS)) - set(connection.execute(sa.select(partition)).scalars())
    if missing:
        connection.execute(sa.insert(tables.partition), [{"partition": number} for number in sorted(missing)])


_LIMITS = ("statement_timeout", "lock_timeout", "idle_in_transaction_session_timeout")


def limits(connection: sa.Connection) -> dict[str, str]:
    """Return the limits that a `SET LOCAL` may have changed for the rest of the transaction (PostgreSQL)."""
    if connection.dialect.name != "postgresql":
        return {}
    return {name: connection.execute(sa.select(sa.func.current_setting(name))).scalar_one() for name in _LIMITS}


def set_limits(connection: sa.Connection, limits: Mapping[str, str]) -> None:
    """Set limits for the rest of the transaction."""
    for name, value in limits.items():
        connection.execute(sa.select(sa.func.set_config(name, value, True)))
