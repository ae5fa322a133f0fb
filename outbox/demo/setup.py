"""Prepares the shop's database."""

from __future__ import annotations

from typing import TYPE_CHECKING

from outbox import migrations
from outbox.demo.tables import Base
from outbox.migrations.sql import apply
from outbox.store.engine import open_engine

if TYPE_CHECKING:
    from outbox.demo.folder import Folder


def create_tables(folder: Folder) -> None:
    """Create the shop's tables, and those of the outbox by the steps that an alembic revision calls too."""
    engine = open_engine(folder.shop_url)  # puts the file into WAL mode, where it stays
    with engine.begin() as connection:
        Base.metadata.create_all(connection)
        apply(connection, range(1, migrations.LATEST + 1))
    engine.dispose()
