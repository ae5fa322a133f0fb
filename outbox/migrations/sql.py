"""Runs the steps without an alembic environment: as SQL text, or on a connection. Needs alembic itself."""

from __future__ import annotations

from io import StringIO
from typing import TYPE_CHECKING, Literal

import sqlalchemy as sa
from alembic.operations import Operations
from alembic.runtime.migration import MigrationContext

from outbox import migrations

if TYPE_CHECKING:
    from collections.abc import Iterable

Direction = Literal["upgrade", "downgrade"]

_LOCK = 0x6F7574626F78  # "outbox", the key of the advisory lock


def statements(dialect_name: str, version: int, *, schema: str | None = None, direction: Direction = "upgrade") -> str:
    """Return the SQL of exactly one step, for psql, Flyway and others; `dialect_name` is `postgresql` or `sqlite`.

    Without BEGIN and COMMIT, because migration tools bring their own; with psql use `--single-transaction`.
    Raises `ConfigurationError` for an unknown version.
    """
    output = StringIO()
    context = MigrationContext.configure(dialect_name=dialect_name, opts={"as_sql": True, "output_buffer": output})
    take = migrations.upgrade if direction == "upgrade" else migrations.downgrade
    take(Operations(context), version=version, schema=schema)
    return output.getvalue().strip() + "\n"


def apply(connection: sa.Connection, versions: Iterable[int], *, schema: str | None = None) -> None:
    """Take the steps `versions`, in their order, in the connection's transaction; commits nothing."""
    op = Operations(MigrationContext.configure(connection))
    for version in versions:
        migrations.upgrade(op, version=version, schema=schema)


def lock(connection: sa.Connection) -> None:
    """Wait until nobody else applies steps to this database, and keep others waiting until the transaction ends."""
    if connection.dialect.name == "postgresql":  # SQLite's write transaction is such a lock by itself
        connection.execute(sa.select(sa.func.pg_advisory_xact_lock(_LOCK)))
