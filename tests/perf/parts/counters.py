"""What a database has done, as it counts itself."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import sqlalchemy as sa


@dataclass(frozen=True)
class Statement:
    """One statement: its text without its values, and how often it was executed."""

    text: str
    calls: int


class Observer:
    """Asks from the outside; its own questions are not counted."""

    def __init__(self, url: str) -> None:
        self._engine = sa.create_engine(url, poolclass=sa.NullPool, isolation_level="AUTOCOMMIT")

    def count_statements(self) -> None:
        """Begin to count from zero; needs `pg_stat_statements` to be preloaded."""
        with self._engine.connect() as connection:
            connection.exec_driver_sql("CREATE EXTENSION IF NOT EXISTS pg_stat_statements")
            connection.exec_driver_sql("SELECT pg_stat_statements_reset()")

    def statements(self) -> list[Statement]:
        """Return what was executed in this database since, the most frequent first; BEGIN and COMMIT among them."""
        query = (
            "SELECT query, calls FROM pg_stat_statements WHERE dbid = (SELECT oid FROM pg_database WHERE datname ="
            " current_database()) AND query NOT LIKE :ours AND query NOT LIKE :counting ORDER BY calls DESC"
        )
        with self._engine.connect() as connection:
            rows = connection.execute(sa.text(query), {"ours": "%the observer asks%", "counting": "%pg_stat_statements%"})
            return [Statement(row.query, row.calls) for row in rows]

    def wal_bytes(self) -> int:
        """Return how much the server has written to its log so far, vacuum included."""
        return self._number("SELECT pg_wal_lsn_diff(pg_current_wal_insert_lsn(), '0/0') /* the observer asks */")

    def rows_written(self, table: str) -> int:
        """Return how many rows of a table were inserted, updated or deleted by sessions that have ended."""
        return self._number(
            f"SELECT n_tup_ins + n_tup_upd + n_tup_del FROM pg_stat_user_tables WHERE relname = '{table}' /* the observer asks */"
        )

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Wait until nobody else is connected to the database; then their statistics are complete."""
        others = (
            "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND backend_type = 'client backend'"
            " AND pid <> pg_backend_pid() /* the observer asks */"
        )
        while self._number(others):
            pass
        yield

    def checkpoint(self) -> None:
        """Write everything to disk now, so that no checkpoint falls into what is measured."""
        with self._engine.connect() as connection:
            connection.exec_driver_sql("CHECKPOINT")

    def _number(self, query: str) -> int:
        with self._engine.connect() as connection:
            return int(connection.exec_driver_sql(query).scalar_one())
