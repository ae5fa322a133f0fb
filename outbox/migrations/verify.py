"""Compares a database's own catalogue with the tables that this release needs.

Alembic's version table is not asked: it tells what was run, not what is there.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import sqlalchemy as sa

from outbox.errors import SchemaError
from outbox.identity import PARTITIONS
from outbox.migrations import LATEST, revision
from outbox.migrations.catalogue import definitions, invalid_indexes, reflect, same

if TYPE_CHECKING:
    from collections.abc import Iterator

    from outbox.tables import Tables

INVALID = "is invalid; drop it and create it again"
"""How a difference ends that is an index which PostgreSQL keeps and does not use."""

_MARK = "schema_version"  # the column whose default is the version of the tables


def verify(connection: sa.Connection, tables: Tables) -> list[str]:
    """Return every difference between the database and what this release needs, in words; none when all is well.

    Looks at tables, columns (type, nullability, default), constraints, indexes (columns, uniqueness, predicate,
    validity) and the rows of partitions. What is there in addition is no difference: see `installed_version`.
    Reads only, and needs a connection that may select from the tables.
    """
    return [difference for table in tables for difference in _differences(connection, table, tables)]


def installed_version(connection: sa.Connection, tables: Tables) -> int:
    """Return the version of the tables in the database, 0 when there are none. Above `LATEST`: they are newer."""
    found = reflect(connection, tables.message)
    if found is None:
        return 0
    return max(_number(found), 1)


def missing_steps(connection: sa.Connection, tables: Tables) -> range:
    """Return the versions still to be applied, in their order; empty when that cannot help."""
    version = installed_version(connection, tables)
    if version == 0 and any(reflect(connection, table) is not None for table in tables):
        return range(0)
    return range(version + 1, LATEST + 1)


def require(connection: sa.Connection, tables: Tables) -> int:
    """Return the version of the tables, or raise `SchemaError` with every difference and what to do about it.

    Tables newer than this release pass as they are, and the returned version is then above `LATEST`: warn about it.
    """
    version = installed_version(connection, tables)
    if version <= LATEST and (differences := verify(connection, tables)):
        raise SchemaError(explain(differences, missing_steps(connection, tables), schema=tables.schema))
    return version


def explain(differences: list[str], steps: range, *, schema: str | None = None) -> str:
    """Return the differences as a message that ends with the exact way out: the revision to paste, or the command."""
    listed = "\n".join(f"  {difference}" for difference in differences)
    return f"the outbox tables are not those of version {LATEST}:\n{listed}\n\n{_remedy(steps, schema)}"


def _remedy(steps: range, schema: str | None) -> str:
    option = "" if schema is None else f" --schema {schema}"
    if not steps:
        return (
            "No revision mends this, because the tables, or some of them, are there and were changed by other means. "
            f"`outbox-relay schema sql{option}` prints how they should be."
        )
    return (
        f"Add this revision to your alembic history (`outbox-relay schema revision{option}` writes it), "
        f"then run `alembic upgrade head`:\n\n{revision.text(steps, schema=schema)}\n"
        f"Without alembic: `outbox-relay schema upgrade{option}`, or `outbox-relay schema sql{option}` for psql or Flyway."
    )


def _number(message: sa.Table) -> int:
    default = message.c[_MARK].server_default if _MARK in message.c else None
    digits = re.search(r"\d+", str(default.arg)) if isinstance(default, sa.DefaultClause) else None
    return int(digits.group()) if digits else 0


def _differences(connection: sa.Connection, table: sa.Table, tables: Tables) -> Iterator[str]:
    found = reflect(connection, table)
    if found is None:
        yield f"{table.fullname}: the table is missing"
        return
    there = definitions(found, connection.dialect)
    for name, needed in definitions(table, connection.dialect).items():
        if name not in there:
            yield f"{table.fullname}: {name} is missing"
        elif not same(there[name], needed) and not (name == f"column {_MARK}" and _number(found) > LATEST):
            yield f"{table.fullname}: {name} is ({there[name]}), should be ({needed})"
    for index in invalid_indexes(connection, table):
        yield f"{table.fullname}: index {index} {INVALID}"
    if table is tables.partition and "partition" in found.c:
        yield from _missing_partitions(connection, table)


def _missing_partitions(connection: sa.Connection, table: sa.Table) -> Iterator[str]:
    there = set(connection.scalars(sa.select(table.c.partition)))
    if absent := sorted(set(range(PARTITIONS)) - there):
        yield f"{table.fullname}: no row for partition {', '.join(map(str, absent))}"
