"""`outbox-relay schema`: brings the tables into a database, and tells whether they are there."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

import click
from sqlalchemy.exc import DBAPIError, OperationalError

from outbox.cli import options
from outbox.cli.exit import Group
from outbox.errors import OutboxError, SchemaError
from outbox.migrations import LATEST, grants, revision
from outbox.migrations.verify import explain, installed_version, missing_steps, verify
from outbox.store.engine import SUPPORTED, open_engine, unavailable
from outbox.tables import Tables

if TYPE_CHECKING:
    from collections.abc import Iterator

    import sqlalchemy as sa

    from outbox.migrations.sql import Direction

_PARTS = {
    "application": grants.APPLICATION,
    "consumer": grants.CONSUMER,
    "relay": grants.RELAY,
    "operator": grants.OPERATOR,
}


@click.group(cls=Group)
def schema() -> None:
    """Create, change and check the outbox tables.

    With alembic: `schema revision`. With psql, Flyway and others: `schema sql`. With neither: `schema upgrade`.
    """


@schema.command("revision")
@click.option(
    "--alembic-config",
    envvar="ALEMBIC_CONFIG",
    show_envvar=True,
    default="alembic.ini",
    show_default=True,
    metavar="FILE",
    help="The configuration of your alembic environment.",
)
@click.option("-m", "--message", help="The revision's message.")
@click.option("--stdout", is_flag=True, help="Print a revision to paste instead; needs no alembic environment.")
@options.schema
def write(alembic_config: str, message: str | None, *, stdout: bool, schema: str | None) -> None:
    """Write an alembic revision that takes the steps your revisions do not take yet.

    It follows your current head, your template and your file names. Then run `alembic upgrade head`.

    Example: outbox-relay schema revision --message "add the outbox"
    """
    if stdout:
        click.echo(revision.text(range(1, LATEST + 1), schema=schema), nl=False)
        return
    from outbox.migrations.environment import write_revision  # alembic is slow to load

    path = write_revision(alembic_config, schema=schema, message=message)
    click.echo(f"your revisions have version {LATEST} already" if path is None else str(path))


@schema.command("sql")
@click.option("--dialect", type=click.Choice(SUPPORTED), default="postgresql", show_default=True)
@click.option("--version", type=int, metavar="N", help="Only the step to this version (default: every step).")
@click.option("--downgrade", is_flag=True, help="The way back, which drops the tables with what is in them.")
@options.schema
def print_sql(dialect: str, version: int | None, *, downgrade: bool, schema: str | None) -> None:
    """Print the SQL of the steps, for psql, Flyway and others. It brings no BEGIN and COMMIT.

    Example: outbox-relay schema sql | psql --single-transaction -v ON_ERROR_STOP=1 shop
    """
    from outbox.migrations.sql import statements  # alembic is slow to load

    steps = range(1, LATEST + 1) if version is None else range(version, version + 1)
    direction: Direction = "downgrade" if downgrade else "upgrade"
    ordered = reversed(steps) if downgrade else steps
    click.echo("\n".join(statements(dialect, step, schema=schema, direction=direction) for step in ordered), nl=False)


@schema.command("grants")
@click.option("--application", default="outbox_application", show_default=True, metavar="ROLE", help="Enqueues.")
@click.option("--consumer", default="outbox_consumer", show_default=True, metavar="ROLE", help="Handles messages.")
@click.option("--relay", default="outbox_relay", show_default=True, metavar="ROLE", help="Runs `outbox-relay run`.")
@click.option("--operator", default="outbox_operator", show_default=True, metavar="ROLE", help="Runs the other commands.")
@click.option("--create-roles", is_flag=True, help="Create the roles too (without LOGIN: grant them to those who log in).")
@click.option(
    "--monitor", is_flag=True, help="Let the operator see other roles' sessions, for doctor; a superuser must run that."
)
@options.schema
def print_grants(schema: str | None, *, create_roles: bool, monitor: bool, **roles: str) -> None:
    """Print the SQL that gives each part of outbox the rights that it needs, and no more (PostgreSQL).

    An application can only insert events; a relay cannot change what they say. Two parts may be one role. What a role has
    already is not taken from it. After an update of the tables, run it again.

    Example: outbox-relay schema grants --create-roles | psql --single-transaction -v ON_ERROR_STOP=1 shop
    """
    parts: dict[str, list[grants.Part]] = {}
    for name, part in _PARTS.items():
        parts.setdefault(roles[name], []).append(part)
    text = grants.statements(parts, schema=schema, create_roles=create_roles, monitor=roles["operator"] if monitor else None)
    click.echo(text, nl=False)


@schema.command("verify")
@options.database_url
@options.schema
def check(database_url: str, schema: str | None) -> None:
    """Compare the database with the tables that this release needs; exit code 5 when they differ.

    Example: outbox-relay schema verify --database-url postgresql+psycopg://app@db/shop
    """
    tables = Tables(schema=schema)
    with _transaction(database_url) as connection:
        differences = verify(connection, tables)
        version = installed_version(connection, tables)
    if differences:
        click.echo("\n".join(differences))
        raise SchemaError(f"{len(differences)} differences from schema version {LATEST}")
    newer = f", newer than the {LATEST} that this release knows" if version > LATEST else ""
    click.echo(f"schema version {version}: ok{newer}")


@schema.command("upgrade")
@options.database_url
@options.schema
def apply_steps(database_url: str, schema: str | None) -> None:
    """Create the tables, or bring them up to date, in one transaction; for databases that alembic does not look after.

    Changes nothing when all is well. When tables are there that differ, it lists how and changes nothing (exit code 5).

    Example: outbox-relay schema upgrade --database-url sqlite:///outbox.db
    """
    from outbox.migrations.sql import apply, lock  # alembic is slow to load

    tables = Tables(schema=schema)
    with _transaction(database_url) as connection:
        lock(connection)
        steps = missing_steps(connection, tables)
        apply(connection, steps, schema=schema)
        if differences := verify(connection, tables):
            raise SchemaError(explain(differences, range(0), schema=schema))
        version = installed_version(connection, tables)
    click.echo(f"schema version {version}: {'upgraded' if steps else 'ok, nothing to do'}")


@contextmanager
def _transaction(url: str) -> Iterator[sa.Connection]:
    engine = open_engine(url)
    try:
        with engine.begin() as connection:
            yield connection
    except OperationalError as error:
        raise unavailable(error) from error
    except DBAPIError as error:
        cause = str(error.orig).strip().partition("\n")[0]
        raise OutboxError(f"database: {cause}") from error
    finally:
        engine.dispose()
