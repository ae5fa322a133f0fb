"""The alembic environment: the outbox's tables next to the payments' own."""

from __future__ import annotations

from logging.config import fileConfig

from alembic import context

import outbox
from payments.database import engine
from payments.models import Base

target_metadata = [Base.metadata, outbox.metadata]


def run_offline() -> None:
    """Print the SQL instead of executing it."""
    context.configure(url=engine.url, target_metadata=target_metadata, literal_binds=True)
    with context.begin_transaction():
        context.run_migrations()


def run_online() -> None:
    """Migrate the database."""
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
