"""What most unit tests begin with that need a database."""

import pytest

from tests.rows import sqlite_database


@pytest.fixture
def engine(tmp_path):
    """An engine on a new SQLite file with the tables."""
    engine = sqlite_database(tmp_path)
    yield engine
    engine.dispose()
