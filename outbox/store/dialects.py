"""The few things that PostgreSQL and SQLite say differently."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import sqlalchemy as sa
from sqlalchemy.dialects.postgresql import ARRAY

if TYPE_CHECKING:
    from collections.abc import Iterable


def is_in(connection: sa.Connection, column: sa.ColumnElement[Any], values: Iterable[Any]) -> sa.ColumnElement[bool]:
    """Return `column IN values` with the values as one parameter: the same statement text for any number of them."""
    listed = list(values)
    if connection.dialect.name == "sqlite":
        each = sa.func.json_each(json.dumps(listed)).table_valued("value")
        return column.in_(sa.select(each.c.value))
    return column == sa.any_(sa.literal(listed, ARRAY(column.type)))


def limit_statements(connection: sa.Connection, seconds: float) -> None:
    """Let no statement of this transaction run, or wait for a lock, longer than so many seconds.

    `SET LOCAL` ends with the transaction, so it is safe behind a transaction-pooling PgBouncer.
    """
    if connection.dialect.name == "postgresql":
        connection.exec_driver_sql(f"SET LOCAL statement_timeout = {int(seconds * 1000)}")
