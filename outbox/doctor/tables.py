"""Checks of the tables themselves: that they are there, as they should be, and that this role may use them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from outbox.doctor.findings import info, problem, some, warning
from outbox.migrations import LATEST, grants
from outbox.migrations.verify import INVALID, installed_version, missing_steps, verify
from outbox.store import server

if TYPE_CHECKING:
    from collections.abc import Iterator

    from outbox.doctor.findings import Finding
    from outbox.doctor.scope import Database


def schema(database: Database) -> Iterator[Finding]:
    """Tables, columns, constraints and indexes are those that this release needs, and the indexes are valid."""
    connection, tables = database.connection, database.tables
    version = installed_version(connection, tables)
    if version > LATEST:
        yield warning(
            f"the tables have version {version}, and this release knows {LATEST}",
            "a relay of this release leaves newer messages alone",
            f"update outbox-relay to a release that knows version {version}",
        )
        return
    option = "" if tables.schema is None else f" --schema {tables.schema}"
    differences = verify(connection, tables)
    invalid = [each.partition(";")[0] for each in differences if each.endswith(INVALID)]
    if invalid:
        yield problem(
            some(invalid),
            "PostgreSQL does not use it: a CREATE INDEX CONCURRENTLY has failed, and claims walk the whole table",
            f"DROP INDEX, then create it as `outbox-relay schema sql{option}` has it",
        )
    if others := [each for each in differences if not each.endswith(INVALID)]:
        yield problem(
            some(others),
            "a relay does not start; one that runs may be slow, or fail",
            f"outbox-relay schema upgrade{option}, or with alembic schema revision{option}"
            if missing_steps(connection, tables)
            else f"make it as `outbox-relay schema sql{option}` prints it; schema verify lists all differences",
        )


def privileges(database: Database) -> Iterator[Finding]:
    """The current role may do what a relay does, or what an operator does."""
    connection, name = database.connection, database.tables.schema
    role = server.role(connection)
    if name is not None and not server.may_use(connection, name):
        yield problem(
            f"role {role} may not use schema {name}, or there is none",
            "it finds none of the tables there",
            f'GRANT USAGE ON SCHEMA "{name}" TO {role}; see `outbox-relay schema grants --schema {name}`',
        )
        return
    missing = server.missing_rights(connection, name, grants.RELAY.rights)
    if not missing:
        return
    if not server.missing_rights(connection, name, grants.OPERATOR.rights):
        yield info(f"role {role} is an operator's; whether the relay has its rights, a doctor with the relay's database URL says")
        return
    yield problem(
        f"role {role} lacks {some(missing)}",
        "a relay with this role fails at that step, over and over",
        "outbox-relay schema grants prints what each role needs",
    )
