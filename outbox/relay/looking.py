"""Looks at a relay's database for its metrics."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

from outbox.store.dialects import limit_statements
from outbox.store.engine import open_engine
from outbox.store.gauges import gauges
from outbox.tables import Tables

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from outbox.settings import RelaySettings
    from outbox.store.gauges import Gauges

_STATEMENT_LIMIT_S = 2.0


@contextmanager
def looking(settings: RelaySettings) -> Iterator[Callable[[], Gauges]]:
    """Give a look, with one connection of its own that is opened at the first: it may hang, and holds nobody up.

    Raises `ConfigurationError` for a URL that cannot work.
    """
    engine = open_engine(settings.database_url, application_name="outbox-metrics", pool_size=1)
    tables = Tables(schema=settings.schema)

    def look() -> Gauges:
        with engine.connect() as connection:
            limit_statements(connection, _STATEMENT_LIMIT_S)
            return gauges(connection, tables)

    try:
        yield look
    finally:
        engine.dispose()
