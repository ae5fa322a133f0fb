"""The pytest plugin: fixtures for tests that are rolled back. Nothing is imported before one of them is used."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator

    from sqlalchemy import Connection, Engine
    from sqlalchemy.orm import Session


@pytest.fixture
def outbox_engine() -> Engine:
    """Return the engine of the test database: for you to override, with any scope."""
    pytest.fail(
        "override the fixture outbox_engine in your conftest.py, so that it returns the engine of a database with your tables "
        "and those of the outbox",
        pytrace=False,
    )


@pytest.fixture
def outbox_connection(outbox_engine: Engine) -> Iterator[Connection]:
    """Return a connection in a transaction that is rolled back after the test."""
    from outbox.testing.joining import begin_really

    with outbox_engine.connect() as connection, connection.begin() as transaction:
        begin_really(connection)
        yield connection
        transaction.rollback()


@pytest.fixture
def outbox_session(outbox_connection: Connection) -> Iterator[Session]:
    """Return a session in which the code under test may commit and roll back; all of it is undone after the test."""
    from sqlalchemy.orm import Session

    from outbox.testing import committed  # noqa: F401 - from here on it notes what is not committed

    with Session(outbox_connection, join_transaction_mode="create_savepoint") as session:
        yield session
