"""Says in words what differs between two states of the database."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

from outbox.testing.state import frozen

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    Row = Mapping[str, Any]
    Rows = Mapping[str, Sequence[Row]]

_LONGEST = 200


def differences(expected: Rows, found: Rows, keys: Mapping[str, Sequence[str]]) -> list[str]:
    """Return one line for each row and column that differs. `keys` names the columns of each table's primary key."""
    return [
        line for table in expected for line in _of_table(table, *_unequal(expected[table], found[table]), key=keys.get(table, ()))
    ]


def _unequal(expected: Sequence[Row], found: Sequence[Row]) -> tuple[list[Row], list[Row]]:
    surplus = Counter(map(_hashed, found)) - Counter(map(_hashed, expected))
    lacking = Counter(map(_hashed, expected)) - Counter(map(_hashed, found))
    return _taken(expected, lacking), _taken(found, surplus)


def _taken(rows: Sequence[Row], wanted: Counter[Any]) -> list[Row]:
    taken, left = [], wanted.copy()
    for row in rows:
        if left[_hashed(row)] > 0:
            left[_hashed(row)] -= 1
            taken.append(row)
    return taken


def _hashed(row: Row) -> Any:
    return frozenset((column, frozen(value)) for column, value in row.items())


def _of_table(table: str, lacking: list[Row], surplus: list[Row], *, key: Sequence[str]) -> Iterator[str]:
    for row in list(lacking):
        changed = next((other for other in surplus if _same_row(row, other, key)), None)
        if changed is not None:
            lacking.remove(row)
            surplus.remove(changed)
            yield from _changes(table, row, changed, key)
    # Without a key that tells which is which, as many as there are on both sides have changed.
    for row, other in zip(lacking, surplus, strict=False):
        yield from _changes(table, row, other, key)
    both = min(len(lacking), len(surplus))
    yield from (f"{table}: a row too few:  {described(row)}" for row in lacking[both:])
    yield from (f"{table}: a row too many: {described(row)}" for row in surplus[both:])


def _same_row(row: Row, other: Row, key: Sequence[str]) -> bool:
    return bool(key) and all(name in row and name in other and row[name] == other[name] for name in key)


def _changes(table: str, expected: Row, found: Row, key: Sequence[str]) -> Iterator[str]:
    names = [name for name in key if name in expected] or [name for name in expected if expected[name] == found.get(name, ...)]
    where = described({name: expected[name] for name in names})
    for column in {**expected, **found}:
        was, now = expected.get(column, ...), found.get(column, ...)
        if was is not now and frozen(was) != frozen(now):
            yield f"{table}: column {column} is {_shown(now)}, expected {_shown(was)}  ({where})"


def described(row: Row) -> str:
    """Return a row on one line."""
    return ", ".join(f"{column}={_shown(value)}" for column, value in row.items())


def _shown(value: Any) -> str:
    text = "a new value" if value is ... else repr(value)
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."
