"""Clock expressions: what they compile to, and that statements with them are compiled once."""

import pytest
import sqlalchemy as sa
from sqlalchemy.dialects import postgresql, sqlite

from outbox.sqltypes import later, now


@pytest.mark.parametrize(
    ("dialect", "expected"),
    [
        (postgresql.dialect(), "statement_timestamp() + make_interval(secs => 1.5)"),
        (sqlite.dialect(), "strftime('%Y-%m-%d %H:%M:%f000', 'now', 1.5 || ' seconds')"),
    ],
)
def test_later_is_the_clock_of_the_database_plus_seconds(dialect, expected):
    assert expected in str(later(sa.literal_column("1.5")).compile(dialect=dialect))


@pytest.mark.parametrize("clock", [now, lambda: later(sa.literal(30.0, sa.Float))])
def test_a_statement_with_a_clock_is_compiled_once(clock):
    engine = sa.create_engine("sqlite://")
    compiled = []

    @sa.event.listens_for(engine, "before_cursor_execute")
    def note(_connection, _cursor, _statement, _parameters, context, _many):
        compiled.append(context.compiled.cache_key is not None and context.cache_hit.name)

    with engine.connect() as connection:
        for _ in range(3):
            connection.execute(sa.select(clock()))
    engine.dispose()
    assert compiled[1:] == ["CACHE_HIT", "CACHE_HIT"]
