"""The roles of `outbox-relay schema grants`, made as its SQL says, to log in with."""

import secrets
from collections.abc import Iterator
from contextlib import contextmanager

import sqlalchemy as sa
from click.testing import CliRunner

from outbox.cli.schema import schema as command

PARTS = ("application", "consumer", "relay", "operator")
_PASSWORD = "only-for-tests"


@contextmanager
def roles(database_url: str, *arguments: str) -> Iterator[dict[str, str]]:
    """Make the four roles in a database that has the tables; give the URL of each. They are dropped in the end."""
    names = {part: f"outbox_{part}_{secrets.token_hex(4)}" for part in PARTS}
    chosen = [word for part, name in names.items() for word in (f"--{part}", name)]
    printed = CliRunner().invoke(command, ["grants", "--create-roles", *chosen, *arguments], catch_exceptions=False).stdout
    engine = sa.create_engine(database_url, poolclass=sa.NullPool)
    with engine.begin() as connection:
        connection.exec_driver_sql(printed)
        for name in names.values():
            connection.exec_driver_sql(f"ALTER ROLE {name} LOGIN PASSWORD '{_PASSWORD}'")
    try:
        yield {part: _url(database_url, name) for part, name in names.items()}
    finally:
        with engine.begin() as connection:
            for name in names.values():
                connection.exec_driver_sql(f"DROP OWNED BY {name}")
                connection.exec_driver_sql(f"DROP ROLE {name}")


def _url(database_url: str, name: str) -> str:
    return sa.make_url(database_url).set(username=name, password=_PASSWORD).render_as_string(hide_password=False)
