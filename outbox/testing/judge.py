"""Judges whether an outcome is the expected one: in the tables, the events, and the calls."""

from __future__ import annotations

from typing import TYPE_CHECKING

from outbox.testing.difference import differences
from outbox.testing.state import Lately, rows_by_name, visible, volatile_between, volatile_by_default

if TYPE_CHECKING:
    from collections.abc import Iterable

    from outbox.inbox import Inbox
    from outbox.testing.calls import CallRules
    from outbox.testing.database import Contents, Database
    from outbox.testing.delivery import Outcome


class Judge:
    """Compares outcomes, without the columns that cannot be the same twice."""

    def __init__(self, inbox: Inbox, database: Database, *, calls: CallRules, ignore: Iterable[str]) -> None:
        self._tables = inbox.tables
        self._calls = calls
        self._ignored = frozenset(ignore)
        self._volatile = volatile_by_default(database.tables)
        business = (table for table in database.tables if table not in set(inbox.tables))
        self._keys = {table.fullname: [column.key for column in table.primary_key] for table in business}
        self._lately = Lately()
        self._seen_volatile: set[tuple[str, str]] = set()

    @property
    def not_compared(self) -> tuple[str, ...]:
        """The columns whose new values are not compared, and those to be ignored."""
        learned = {f"{table}.{column}" for table, column in self._seen_volatile}
        return tuple(sorted(learned | self._ignored))

    def sees(self, start: Contents, outcome: Outcome) -> bool:
        """Tell whether an outcome differs from the start in anything that is compared."""
        was, now = rows_by_name(start, self._tables), rows_by_name(outcome.contents, self._tables)
        return was != now or bool(outcome.calls)

    def learn(self, start: Contents, one: Outcome, other: Outcome) -> list[str]:
        """Learn from two outcomes of the same which columns are never the same; return what differs in spite of it."""
        first, second = rows_by_name(one.contents, self._tables), rows_by_name(other.contents, self._tables)
        self._seen_volatile = volatile_between(first, second)
        self._volatile |= self._seen_volatile
        return self.problems(start, one, other)

    def problems(self, start: Contents, expected: Outcome, found: Outcome) -> list[str]:
        """Return one line for each difference."""
        return [
            *self.difference(start, expected.contents, found.contents),
            *self._calls.problems(expected.calls, found.calls),
        ]

    def difference(self, start: Contents, expected: Contents, found: Contents) -> list[str]:
        """Return one line for each row and column of the database that differs."""
        began = rows_by_name(start, self._tables)
        before, after = (
            visible(
                rows_by_name(each, self._tables), began, volatile=self._volatile, ignored=self._is_ignored, lately=self._lately
            )
            for each in (expected, found)
        )
        return differences(before, after, self._keys)

    def _is_ignored(self, table: str, column: str) -> bool:
        return column in self._ignored or f"{table}.{column}" in self._ignored
