"""A database with the outbox tables, filled by SQL, and what the server says of itself."""

import sqlalchemy as sa

from outbox.migrations import LATEST
from outbox.migrations.sql import apply
from outbox.store.engine import open_engine
from outbox.tables import DEFAULT
from tests.perf.parts.broker import TOPIC
from tests.servers.postgres import Databases

KEYS = 1000

_FRESH = f"""
INSERT INTO outbox_message (message_id, topic, key, partition, type, content_type, payload)
SELECT gen_random_uuid(), '{TOPIC}', 'key-' || n % {KEYS}, n % {KEYS} % 64, 'bench', 'application/json',
       convert_to('{{"number": ' || n || ', "text": "' || repeat('x', 200) || '"}}', 'utf8')
FROM generate_series(CAST(:first AS bigint), CAST(:last AS bigint)) AS n
"""


def prepared(server: Databases) -> sa.Engine:
    """Make a database with the tables."""
    engine = open_engine(server.create_database(), pool_size=4)
    with engine.begin() as connection:
        apply(connection, range(1, LATEST + 1))
    return engine


def url_of(engine: sa.Engine) -> str:
    """Return the URL, with the password."""
    return engine.url.render_as_string(hide_password=False)


def insert_fresh(engine: sa.Engine, numbers: range) -> None:
    """Commit pending messages with these numbers, of a thousand keys."""
    with engine.begin() as connection:
        connection.execute(sa.text(_FRESH), {"first": numbers.start, "last": numbers.stop - 1})


def count(engine: sa.Engine, *conditions: sa.ColumnElement[bool], table: sa.FromClause = DEFAULT.message) -> int:
    """Return how many rows there are."""
    with engine.connect() as connection:
        return connection.execute(sa.select(sa.func.count()).select_from(table).where(*conditions)).scalar_one()


def autocommit(engine: sa.Engine, *statements: str) -> None:
    """Execute what cannot run in a transaction."""
    with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        for statement in statements:
            connection.execute(sa.text(statement))


def settings(engine: sa.Engine) -> dict[str, str]:
    """Say what the server is, and how it writes."""
    names = ("server_version", "fsync", "synchronous_commit", "shared_buffers")
    with engine.connect() as connection:
        return {f"postgres_{name}": connection.execute(sa.text(f"SHOW {name}")).scalar_one() for name in names}
