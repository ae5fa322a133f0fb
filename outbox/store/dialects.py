"""The few things that PostgreSQL and SQLite say differently."""

from __future__ import annotations

import hashlib
import json
from typing import TYPE_CHECKING, Any

import sqlalchemy as sa
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.dialects.postgresql import ARRAY

from outbox.errors import ConfigurationError
from outbox.sqltypes import BigInts

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
    dialect = connection.dialect.name
    return _is_among(dialect, column, sa.literal(given(dialect, list(values)), _array(dialect, column.type)))


def are_given(dialect: str, column: sa.ColumnElement[Any], name: str) -> sa.ColumnElement[bool]:
    """Return the same for a statement that is built once, and executed with `{name: given(dialect, values)}`."""
    return _is_among(dialect, column, sa.bindparam(name, type_=_array(dialect, column.type)))


def given(dialect: str, values: Sequence[Any]) -> Sequence[Any] | str:
    """Return what a statement with `are_given` or `numbered` is executed with."""
    return json.dumps(values) if dialect == "sqlite" else values


def _is_among(dialect: str, column: sa.ColumnElement[Any], values: sa.BindParameter[Any]) -> sa.ColumnElement[bool]:
    if dialect == "sqlite":
        each = sa.func.json_each(values).table_valued("value")
        return column.in_(sa.select(each.c.value))
    return column == sa.any_(values)


def _array(dialect: str, kind: TypeEngine[Any]) -> TypeEngine[Any]:
    if dialect == "sqlite":
        return sa.Text()
    return BigInts() if isinstance(kind, sa.BigInteger) else ARRAY(kind)


def numbered(dialect: str, name: str) -> sa.FromClause:
    """Return several whole numbers to join, with their `place`, from 0 on, and `value`; executed with `{name: given(dialect, values)}`.

    Cheaper for PostgreSQL to read than what is `listed`.
    """
    values = sa.bindparam(name, type_=_array(dialect, sa.BigInteger()))
    if dialect == "sqlite":
        pair = sa.func.json_each(values).table_valued("key", "value")
        return sa.select(pair.c.key.label("place"), pair.c.value).subquery("numbered")
    unnested = sa.func.unnest(values).table_valued(sa.column("value", sa.BigInteger()), with_ordinality="nth").render_derived()
    return sa.select((unnested.c.nth - 1).label("place"), unnested.c.value).subquery("numbered")


def appended(dialect: str, array: sa.ColumnElement[Any], *, most: int, **entry: sa.ColumnElement[Any]) -> sa.ColumnElement[Any]:
    """Return a JSON array with one object more at its end, and without its first one when it has `most` already."""
    names_and_values = [part for name, value in entry.items() for part in (sa.literal_column(f"'{name}'"), value)]
    if dialect == "sqlite":
        kept = sa.case((sa.func.json_array_length(array) < most, array), else_=sa.func.json_remove(array, "$[0]"))
        return sa.func.json_insert(kept, "$[#]", sa.func.json_object(*names_and_values), type_=array.type)
    without_first = array.op("-", return_type=array.type)(sa.literal_column("0"))
    kept = sa.case((sa.func.jsonb_array_length(array) < most, array), else_=without_first)
    return kept.op("||", return_type=array.type)(sa.func.jsonb_build_object(*names_and_values))


def listed(dialect: str, rows: Sequence[Mapping[str, Any]] | sa.BindParameter[str], **columns: TypeEngine[Any]) -> sa.FromClause:
    """Return rows of values as something to join: the same statement text for any number of them.

    They go as one text, `as_json`; a parameter is given it when the statement is executed.
    """
    text = rows if isinstance(rows, sa.BindParameter) else sa.literal(as_json(rows), sa.Text())
    if dialect == "sqlite":
        each = sa.func.json_each(text).table_valued("value")
        values = [sa.func.json_extract(each.c.value, f"$.{name}", type_=kind).label(name) for name, kind in columns.items()]
        return sa.select(*values).subquery("listed")
    named = [sa.column(name, kind) for name, kind in columns.items()]
    return (
        sa.func.json_to_recordset(sa.cast(text, postgresql.JSON))
        .table_valued(*named, name="listed")
        .render_derived(with_types=True)
    )


def as_json(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return what a parameter of `listed` is given. Without escapes, which before PostgreSQL 13 only UTF-8 can take back."""
    return json.dumps(rows, ensure_ascii=False)


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


def limit_statements(connection: sa.Connection, seconds: float, **settings: str) -> None:
    """Let no statement of this transaction run, or wait for a lock, longer than so many seconds; more `settings` of PostgreSQL too.

    Nor let the client pause in it for long: a process that is suspended here would keep its locks, and with them its
    partitions, for as long as its connection lives.
    """
    limits = _in_milliseconds(statement_timeout=seconds, idle_in_transaction_session_timeout=_MOST_IDLE_S)
    set_locally(connection, **limits, **settings)


def limit_waits(connection: sa.Connection, *, statement_s: float, lock_s: float) -> None:
    """Bound, in one of our transactions on an application's connection, each statement, each wait for a lock, and each pause."""
    set_limits(connection, statement_timeout=statement_s, lock_timeout=lock_s, idle_in_transaction_session_timeout=_MOST_IDLE_S)


def set_limits(connection: sa.Connection, **seconds: float | None) -> None:
    """Set those of PostgreSQL's limits that are given, each by its name, for the rest of the transaction."""
    set_locally(connection, **_in_milliseconds(**seconds))


def _in_milliseconds(**seconds: float | None) -> dict[str, str]:
    return {name: str(max(1, round(limit * 1000))) for name, limit in seconds.items() if limit is not None}


def set_locally(connection: sa.Connection, **settings: str) -> None:
    """Set these of PostgreSQL's settings for the rest of the transaction; elsewhere there are none.

    One statement that any driver prepares, unlike several SETs in one text; of one column, because each that comes back costs as
    much as a setting. It ends with the transaction, so it is safe behind a transaction-pooling PgBouncer.
    """
    if settings and connection.dialect.name == "postgresql":
        each = (f"set_config('{name}', '{value}', true)" for name, value in settings.items())
        connection.exec_driver_sql(f"SELECT concat({', '.join(each)})")
