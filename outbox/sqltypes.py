"""Column types and clock expressions that mean the same on every supported database.

All times are the database's own clock, in UTC. The clock is the start of the *statement*, not of the
transaction, so that a lease stamped after waiting for a lock is not already old; and it is stable
within the statement, so that an index on a time column can serve a comparison with it.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from sqlalchemy import JSON, BigInteger, DateTime, Float, Integer
from sqlalchemy.dialects.postgresql import ARRAY, JSONB
from sqlalchemy.ext.compiler import compiles
from sqlalchemy.sql.functions import FunctionElement
from sqlalchemy.types import TypeDecorator, UserDefinedType

if TYPE_CHECKING:
    from collections.abc import Callable

    from sqlalchemy.engine import Dialect
    from sqlalchemy.sql.compiler import SQLCompiler


class UtcDateTime(TypeDecorator[datetime]):
    """An aware datetime, always returned in UTC; stored without zone where the database has none (SQLite)."""

    impl = DateTime(timezone=True)
    cache_ok = True

    def process_bind_param(self, value: datetime | None, dialect: Dialect) -> datetime | None:
        """Convert to UTC; SQLite compares times as text, so the zone is dropped there."""
        if value is None:
            return None
        value = value.astimezone(UTC)
        return value.replace(tzinfo=None) if dialect.name == "sqlite" else value

    def process_result_value(self, value: datetime | None, dialect: Dialect) -> datetime | None:
        """Return an aware datetime in UTC."""
        del dialect
        if value is None:
            return None
        return value.replace(tzinfo=UTC) if value.tzinfo is None else value.astimezone(UTC)


class SessionDateTime(UtcDateTime):
    """The same as the driver gives it, in the time zone of the session: for what is read in large numbers."""

    cache_ok = True

    def result_processor(self, dialect: Dialect, coltype: object) -> Callable[[Any], datetime | None] | None:
        """Return nothing to do, but where the database has no zones."""
        return super().result_processor(dialect, coltype) if dialect.name == "sqlite" else None


class BigInts(TypeDecorator[Sequence[int]]):
    """An array of whole numbers as a parameter. psycopg gets it in PostgreSQL's own text: it takes many times longer over a list."""

    impl = ARRAY(BigInteger())
    cache_ok = True

    def bind_processor(self, dialect: Dialect) -> Callable[[Any], Any] | None:
        """Return what writes it."""
        return _array_text if dialect.driver == "psycopg" else super().bind_processor(dialect)


def _array_text(numbers: Sequence[int]) -> str:
    return f"{{{','.join(map(str, numbers))}}}"


class JsonText(UserDefinedType[Any]):
    """What was cast from JSON to text, and is JSON again: psycopg's own way takes as long for `{}` as for the rest of a row."""

    cache_ok = True

    def get_col_spec(self, **_: Any) -> str:
        """Return the name of what it is cast to."""
        return "TEXT"

    def result_processor(self, dialect: Dialect, coltype: object) -> Callable[[str | None], Any]:
        """Return what reads it; most messages have no headers."""
        del dialect, coltype
        return _read_json


def _read_json(text: str | None) -> Any:
    return {} if text == "{}" else None if text is None else json.loads(text)


BigId = BigInteger().with_variant(Integer(), "sqlite")  # SQLite numbers rows by itself only in a column of type INTEGER
Headers = JSON(none_as_null=True).with_variant(JSONB(none_as_null=True), "postgresql")


# Functions, rather than elements of their own, because SQLAlchemy can then cache the statements that contain them.
class now(FunctionElement[datetime]):  # noqa: N801 - reads like the SQL function that it is
    """The database's clock at the start of the statement."""

    type = UtcDateTime()
    inherit_cache = True


class later(FunctionElement[datetime]):  # noqa: N801 - reads like the SQL function that it is
    """`later(seconds)`: the database's clock plus so many seconds, given as an expression."""

    type = UtcDateTime()
    inherit_cache = True


class seconds_since(FunctionElement[float]):  # noqa: N801 - reads like the SQL function that it is
    """`seconds_since(column)`: how long ago that was, by the database's clock at the start of the statement."""

    type = Float()
    inherit_cache = True


class json_bytes(FunctionElement[int]):  # noqa: N801 - reads like the SQL function that it is
    """`json_bytes(column)`: about how many bytes the JSON in it takes, or 0 where it is so small that nobody needs to know."""

    type = Integer()
    inherit_cache = True


_SQLITE_FORMAT = "'%Y-%m-%d %H:%M:%f000'"  # the text that SQLAlchemy stores for a datetime: six digits of a second


@compiles(now)
def _now(_element: now, _compiler: SQLCompiler, **_: Any) -> str:
    return "statement_timestamp()"


@compiles(now, "sqlite")
def _now_sqlite(_element: now, _compiler: SQLCompiler, **_: Any) -> str:
    return f"(strftime({_SQLITE_FORMAT}, 'now'))"


@compiles(later)
def _later(element: later, compiler: SQLCompiler, **options: Any) -> str:
    return f"(statement_timestamp() + make_interval(secs => {compiler.process(element.clauses, **options)}))"


@compiles(later, "sqlite")
def _later_sqlite(element: later, compiler: SQLCompiler, **options: Any) -> str:
    return f"strftime({_SQLITE_FORMAT}, 'now', {compiler.process(element.clauses, **options)} || ' seconds')"


@compiles(seconds_since)
def _seconds_since(element: seconds_since, compiler: SQLCompiler, **options: Any) -> str:
    return f"extract(epoch FROM statement_timestamp() - {compiler.process(element.clauses, **options)})::double precision"


@compiles(seconds_since, "sqlite")
def _seconds_since_sqlite(element: seconds_since, compiler: SQLCompiler, **options: Any) -> str:
    return f"((julianday('now') - julianday({compiler.process(element.clauses, **options)})) * 86400.0)"


@compiles(json_bytes)
def _json_bytes(element: json_bytes, compiler: SQLCompiler, **options: Any) -> str:
    # What takes this little as it is stored is small: no compression of PostgreSQL's gains more than 255 to 1. Else it is unpacked, by
    # adding nothing to it, which is many times cheaper than writing it as text.
    column = compiler.process(element.clauses, **options)
    return f"CASE WHEN pg_column_size({column}) <= 500 THEN 0 ELSE pg_column_size({column} || '{{}}'::jsonb) END"


@compiles(json_bytes, "sqlite")
def _json_bytes_sqlite(element: json_bytes, compiler: SQLCompiler, **options: Any) -> str:
    return f"length({compiler.process(element.clauses, **options)})"
