"""What most integration tests begin with."""

import pytest

from tests.rows import database


@pytest.fixture
def engine(database_url):
    """An engine as the relay opens it, on a new database with the tables."""
    engine = database(database_url)
    yield engine
    engine.dispose()
