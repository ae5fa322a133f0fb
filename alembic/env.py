"""The alembic environment, as an application has it; its own metadata goes next to that of the outbox."""

from __future__ import annotations

import os
from logging.config import fileConfig

import sqlalchemy as sa
from alembic import context

import outbox

target_metadata = [outbox.metadata]  # in an application: [Base.metadata, outbox.metadata]

# A URL without a driver means psycopg 3, as it does for the relay; to SQLAlchemy 2.0 it would mean psycopg2.
url = os.environ.get("OUTBOX_DATABASE_URL", "sqlite:///outbox.db").replace("postgresql://", "postgresql+psycopg://", 1)


def run_offline() -> None:
    """Print the SQL instead of executing it."""
    context.configure(url=url, target_metadata=target_metadata, literal_binds=True)
    with context.begin_transaction():
        context.run_migrations()


def run_online() -> None:
    """Migrate the database."""
    engine = sa.create_engine(url, poolclass=sa.NullPool)
    with engine.connect() as connection:
        context.configure(connection=connection, target_metadata=target_metadata)
        with context.begin_transaction():
            context.run_migrations()


if context.config.config_file_name is not None:
    fileConfig(context.config.config_file_name, disable_existing_loggers=False)

if context.is_offline_mode():
    run_offline()
else:
    run_online()
