"""The private servers of a benchmark, and what is to be known of them beside its figures."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import sqlalchemy as sa

from tests.servers.postgres import Postgres
from tests.servers.rabbitmq import RabbitMQ

_SETTINGS = ("server_version", "fsync", "synchronous_commit", "full_page_writes", "shared_buffers")


@contextmanager
def servers() -> Iterator[tuple[Postgres, RabbitMQ]]:
    """Start a PostgreSQL and a RabbitMQ that nobody else uses."""
    with Postgres() as postgres, RabbitMQ() as broker:
        yield postgres, broker


def about(postgres: Postgres | None = None, broker: RabbitMQ | None = None) -> dict[str, Any]:
    """Return the servers' versions and the settings that count."""
    told: dict[str, Any] = {}
    if postgres is not None:
        engine = sa.create_engine(postgres.url, poolclass=sa.NullPool)
        with engine.connect() as connection:
            told |= {f"postgres_{name}": connection.exec_driver_sql(f"SHOW {name}").scalar_one() for name in _SETTINGS}
    if broker is not None:
        told |= {"rabbitmq_version": broker.ctl("version").strip(), "queue": "quorum", "messages": "persistent, confirmed"}
    return told


def preload(postgres: Postgres, library: str) -> bool:
    """Let the server load a library when it starts; tell whether there is one. Restarts a server that runs."""
    engine = sa.create_engine(postgres.url, poolclass=sa.NullPool)
    with engine.connect() as connection:
        query = sa.text("SELECT count(*) FROM pg_available_extensions WHERE name = :name")
        if not connection.execute(query, {"name": library}).scalar_one():
            return False
    with (postgres.folder / "data" / "postgresql.conf").open("a") as configuration:
        configuration.write(f"shared_preload_libraries = '{library}'\n")
    postgres.restart()
    return True
