"""The few things that PostgreSQL and SQLite say differently."""

from __future__ import annotations

import hashlib
import json
from typing import TYPE_CHECKING, Any

import sqlalchemy as sa
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.dialects.postgresql import ARRAY

from outbox.errors import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from sqlalchemy.types import TypeEngine


_MOST_IDLE_S = 10.0
_INSERTS: dict[str, Any] = {"postgresql": postgresql.insert, "sqlite": sqlite.insert}


def insert_into(connection: sa.Connection, table: sa.Table) -> Any:
    """Return an INSERT that may say what happens on a conflict. Raises `ConfigurationError` for an unsupported database."""
    insert = _INSERTS.get(connection.dialect.name)
    if insert is None:
        raise ConfigurationError(f"database {connection.dialect.name!r} is not supported; use {', '.join(_INSERTS)}")
    return insert(table)


def is_in(connection: sa.Connection, column: sa.ColumnElement[Any], values: Iterable[Any]) -> sa.ColumnElement[bool]:
    """Return `column IN values` with the values as one parameter: the same statement text for any number of them."""
    listed = list(values)
    if connection.dialect.name == "sqlite":
        each = sa.func.json_each(json.dumps(listed)).table_valued("value")
        return column.in_(sa.select(each.c.value))
    return column == sa.any_(sa.literal(listed, ARRAY(column.type)))


def appended(
    connection: sa.Connection, array: sa.ColumnElement[Any], *, most: int, **entry: sa.ColumnElement[Any]
) -> sa.ColumnElement[Any]:
    """Return a JSON array with one object more at its end, and without its first one when it has `most` already."""
    names_and_values = [part for name, value in entry.items() for part in (sa.literal_column(f"'{name}'"), value)]
    if connection.dialect.name == "sqlite":
        kept = sa.case((sa.func.json_array_length(array) < most, array), else_=sa.func.json_remove(array, "$[0]"))
        return sa.func.json_insert(kept, "$[#]", sa.func.json_object(*names_and_values), type_=array.type)
    without_first = array.op("-", return_type=array.type)(sa.literal_column("0"))
    kept = sa.case((sa.func.jsonb_array_length(array) < most, array), else_=without_first)
    return kept.op("||", return_type=array.type)(sa.func.jsonb_build_object(*names_and_values))


def listed(connection: sa.Connection, rows: Sequence[Mapping[str, Any]], **columns: TypeEngine[Any]) -> sa.FromClause:
    """Return rows of values as something to join: the same statement text for any number of them."""
    if connection.dialect.name == "sqlite":
        each = sa.func.json_each(json.dumps([[row[name] for name in columns] for row in rows])).table_valued("value")
        parts = enumerate(columns.items())
        values = [sa.func.json_extract(each.c.value, f"$[{place}]", type_=kind).label(name) for place, (name, kind) in parts]
        return sa.select(*values).subquery("listed")
    arrays = [sa.literal([row[name] for row in rows], ARRAY(kind)) for name, kind in columns.items()]
    named = [sa.column(name, kind) for name, kind in columns.items()]
    return sa.func.unnest(*arrays).table_valued(*named, name="listed").render_derived()


def take_turns(connection: sa.Connection, table: sa.Table, name: str) -> None:
    """Wait until no other transaction that has called this with the same name is open; for one that has locked nothing yet.

    On SQLite it takes the write lock, which there is only one of: a transaction that has read before, and others have written
    since, could not get it any more.
    """
    if connection.dialect.name == "sqlite":
        connection.execute(sa.update(table).where(sa.false()).values({table.c.id: table.c.id}))
        return
    number = int.from_bytes(hashlib.sha256(f"{table.fullname} {name}".encode()).digest()[:8], signed=True)
    connection.execute(sa.select(sa.func.pg_advisory_xact_lock(sa.literal(number, sa.BigInteger))))


def limit_statements(connection: sa.Connection, seconds: float) -> None:
    """Let no statement of this transaction run, or wait for a lock, longer than so many seconds.

    Nor let the client pause in it for long: a process that is suspended here would keep its locks, and with them its
    partitions, for as long as its connection lives.
    """
    set_limits(connection, statement_timeout=seconds, idle_in_transaction_session_timeout=_MOST_IDLE_S)


def limit_waits(connection: sa.Connection, *, statement_s: float, lock_s: float) -> None:
    """Bound, in one of our transactions on an application's connection, each statement, each wait for a lock, and each pause."""
    set_limits(connection, statement_timeout=statement_s, lock_timeout=lock_s, idle_in_transaction_session_timeout=_MOST_IDLE_S)


def set_limits(connection: sa.Connection, **seconds: float | None) -> None:
    """Set those of PostgreSQL's limits that are given, each by its name, for the rest of the transaction; elsewhere there are none.

    One statement that any driver prepares, unlike several SETs in one text. It ends with the transaction, so it is safe behind
    a transaction-pooling PgBouncer.
    """
    given = {name: max(1, round(limit * 1000)) for name, limit in seconds.items() if limit is not None}
    if given and connection.dialect.name == "postgresql":
        settings = (f"set_config('{name}', '{limit}', true)" for name, limit in given.items())
        connection.exec_driver_sql(f"SELECT {', '.join(settings)}")
