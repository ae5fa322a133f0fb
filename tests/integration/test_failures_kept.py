"""The record of a message's failures is bounded."""

import sqlalchemy as sa

from outbox.sqltypes import now
from outbox.store.dialects import appended
from outbox.tables import DEFAULT
from tests.rows import database, insert, message


def test_the_oldest_failure_makes_room_for_the_newest(tmp_path):
    record(f"sqlite:///{tmp_path}/outbox.db")


def record(url):
    engine = database(url)
    insert(engine, None)
    for number in range(5):
        with engine.begin() as connection:
            kept = appended(connection.dialect.name, message.c.failures, most=3, at=now(), error=sa.literal(str(number)))
            connection.execute(sa.update(DEFAULT.message).values(failures=kept))
    with engine.connect() as connection:
        (failures,) = connection.execute(sa.select(message.c.failures)).scalars()
    engine.dispose()
    assert [each["error"] for each in failures] == ["2", "3", "4"]
    assert all(each["at"] for each in failures)


def test_the_oldest_failure_makes_room_on_postgresql_too(database_url):
    record(database_url)
