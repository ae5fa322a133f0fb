"""What a database has, and what it should have, as DDL that can be compared.

PostgreSQL keeps expressions in its own words: `state IN ('a', 'b')` becomes `state = ANY (ARRAY['a'::text, 'b'::text])`.
So definitions are compared as token sequences without casts, redundant parentheses and the words that differ.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import sqlalchemy as sa
from sqlalchemy.exc import CompileError, NoSuchTableError
from sqlalchemy.schema import CreateColumn, CreateIndex

if TYPE_CHECKING:
    from collections.abc import Iterator

_DROPPED = re.compile(
    r"""::\w+(\ varying)?(\[\])?    # a cast
    | \ NULLS\ DISTINCT            # what is meant when nothing is said
    | (?<=AS\ IDENTITY)\ \([^)]*\)  # options of the sequence, which are the administrator's business
    """,
    re.VERBOSE,
)
_TOKEN = re.compile(r"'(?:[^']|'')*'|\w+|[<>=!]+|[^\s\w]")
_NOISE = frozenset(("=", "in", "any", "array", "[", "]", '"'))


def reflect(connection: sa.Connection, table: sa.Table) -> sa.Table | None:
    """Return the table as the database has it, or None when it is missing."""
    options: dict[str, Any] = dict(table.kwargs)  # cannot be reflected, and change how other things are written
    try:
        return sa.Table(table.name, sa.MetaData(), schema=table.schema, autoload_with=connection, resolve_fks=False, **options)
    except NoSuchTableError:
        return None


def definitions(table: sa.Table, dialect: sa.Dialect) -> dict[str, str]:
    """Return the DDL of each column, named constraint and index of a table, by what it is."""
    columns = {f"column {c.name}": _ddl(CreateColumn(c), dialect) for c in table.columns}
    indexes = {f"index {i.name}": _ddl(CreateIndex(i), dialect) for i in table.indexes}
    no_statement: Any = None
    # Not by `AddConstraint`, which would take the constraint out of its table's CREATE TABLE for good.
    compiler = dialect.ddl_compiler(dialect, no_statement)
    constraints = {f"constraint {c.name}": compiler.process(c) for c in table.constraints if c.name}
    every = {**columns, **constraints, **indexes}
    return {name: ddl for name, ddl in every.items() if ddl}  # SQLite has some keys in their column


def same(one: str, other: str) -> bool:
    """Tell whether two definitions mean the same."""
    return _tokens(one) == _tokens(other)


def invalid_indexes(connection: sa.Connection, table: sa.Table) -> list[str]:
    """Return the indexes that PostgreSQL keeps but does not use, left behind by a failed CREATE INDEX CONCURRENTLY."""
    if connection.dialect.name != "postgresql":
        return []
    query = sa.text(
        "SELECT c.relname FROM pg_index i JOIN pg_class c ON c.oid = i.indexrelid"
        " WHERE i.indrelid = CAST(:table AS regclass) AND NOT i.indisvalid ORDER BY c.relname"
    )
    name = connection.dialect.identifier_preparer.format_table(table)
    return list(connection.scalars(query, {"table": name}))


def _ddl(element: sa.ClauseElement, dialect: sa.Dialect) -> str:
    try:
        return " ".join(str(element.compile(dialect=dialect)).split())
    except CompileError:
        return "of a type unknown here"  # something that was added by others; none of ours is


def _tokens(definition: str) -> list[Any]:
    found = _TOKEN.findall(_DROPPED.sub("", definition))
    lowered = (token if token.startswith("'") else token.lower() for token in found)
    return _group(token for token in lowered if token not in _NOISE)


def _group(tokens: Iterator[str]) -> list[Any]:
    """Collect tokens up to the closing parenthesis; only around an OR do parentheses matter."""
    group: list[Any] = []
    for word in tokens:
        if word == ")":
            break
        if word != "(":
            group.append(word)
            continue
        inner = _group(tokens)
        group.extend([inner] if "or" in inner else inner)
    return group
