"""What the database holds, made comparable: which columns cannot be the same twice, and what differs in the others."""

from __future__ import annotations

import json
from collections import Counter
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

import sqlalchemy as sa

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from outbox.tables import Tables

    Row = Mapping[str, Any]
    Rows = Mapping[str, Sequence[Row]]

EVENTS = "events enqueued"
_OF_AN_EVENT = ("topic", "key", "type", "content_type", "state")
_SLACK = timedelta(seconds=2)  # a database may keep whole seconds


def rows_by_name(contents: Mapping[sa.Table, Sequence[Row]], tables: Tables) -> Rows:
    """Return the rows of business tables by the table's name, and of the outbox what an event is: its parts, not its bookkeeping."""
    mine = set(tables)
    business = {table.fullname: rows for table, rows in contents.items() if table not in mine}
    return {**business, EVENTS: [_event(row) for row in contents[tables.message]]}


def _event(row: Row) -> Row:
    return {name: row[name] for name in _OF_AN_EVENT} | _parts("payload", _decoded(row)) | _parts("headers", row["headers"])


def _decoded(row: Row) -> Any:
    try:
        return json.loads(row["payload"])
    except ValueError:
        return row["payload"]


def _parts(name: str, value: Any) -> dict[str, Any]:
    return {f"{name}.{part}": each for part, each in value.items()} if isinstance(value, dict) else {name: value}


def volatile_by_default(contents: Iterable[sa.Table]) -> set[tuple[str, str]]:
    """Return the columns that are made anew for each row: generated primary keys, and what refers to them."""
    return {(table.fullname, column.key) for table in contents for column in table.columns if _is_volatile(column)}


def _is_volatile(column: sa.Column[Any]) -> bool:
    if column.foreign_keys and not _is_made(column):
        try:
            return any(key.column is not column and _is_volatile(key.column) for key in column.foreign_keys)
        except sa.exc.InvalidRequestError:  # the other table is not in the MetaData
            return False
    return column.primary_key and _is_made(column)


def _is_made(column: sa.Column[Any]) -> bool:
    made = (column.default, column.server_default, column.identity)
    return any(each is not None for each in made) or column.table.autoincrement_column is column


def volatile_between(one: Rows, other: Rows) -> set[tuple[str, str]]:
    """Return the columns that two single deliveries from the same state have filled differently."""
    return {
        (table, column)
        for table, rows in one.items()
        for column in _columns(rows)
        if len(rows) == len(other[table]) and _values(rows, column) != _values(other[table], column)
    }


def _columns(rows: Sequence[Row]) -> dict[str, None]:
    return {column: None for row in rows for column in row}


def _values(rows: Sequence[Row], column: str) -> Counter[Any]:
    return Counter(frozen(row[column]) for row in rows if column in row)


def frozen(value: Any) -> Any:
    """Return something hashable that is equal for equal values."""
    try:
        hash(value)
    except TypeError:
        return json.dumps(value, sort_keys=True, default=repr)
    return value


class Lately:
    """Since when the test runs: a time since then is one that was just made, whatever column it is in."""

    def __init__(self) -> None:
        self._since = datetime.now(UTC) - _SLACK

    def covers(self, value: Any) -> bool:
        """Tell whether a value is a time since then; one without a zone may be in UTC or local time."""
        if not isinstance(value, datetime):
            return False
        readings = (value.replace(tzinfo=UTC), value.astimezone(UTC)) if value.tzinfo is None else (value,)
        return any(self._since <= each <= datetime.now(UTC) + _SLACK for each in readings)


def visible(
    rows: Rows, start: Rows, *, volatile: set[tuple[str, str]], ignored: Callable[[str, str], bool], lately: Lately
) -> Rows:
    """Return the rows without ignored columns, just made times, and new values of a volatile column."""
    shown = {}
    for table, each in rows.items():
        known = {column: _values(start[table], column) for column in _columns(each) if (table, column) in volatile}
        shown[table] = [
            {
                column: value
                for column, value in row.items()
                if not (ignored(table, column) or lately.covers(value))
                and (column not in known or frozen(value) in known[column])
            }
            for row in each
        ]
    return shown
