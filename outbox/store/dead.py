"""The dead letters: finding them, those of the relay as well as those of consumers, and giving the relay's another chance or up.

Who changes one of the relay's first locks the row of its partition in `outbox_partition`, as a relay does that claims or settles.
So no relay can let a message wait behind a dead one that is being discarded at the same moment, and then nobody would let it go
on. How those of consumers are changed: `outbox.store.given_up`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import sqlalchemy as sa

from outbox.sqltypes import UtcDateTime, now
from outbox.states import State
from outbox.store.dialects import is_in
from outbox.store.plans import exactly

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence
    from datetime import datetime
    from uuid import UUID

    from outbox.tables import Tables

LISTED = ("id", "message_id", "topic", "key", "attempts", "created_at", "received_at", "dead_at", "error_class", "last_error")


@dataclass(frozen=True, slots=True)
class Selection:
    """Which dead letters: those that meet all that is given. `topics` is a pattern; `since` and `until` bound `dead_at`.

    They are the relay's, in `outbox_message`, or with `consumer` those of that one, in `failed_messages`, whose ids are texts.
    """

    message_ids: tuple[UUID, ...] | tuple[str, ...] = ()
    topics: str | None = None
    key: str | None = None
    since: datetime | None = None
    until: datetime | None = None
    error_class: str | None = None
    consumer: str | None = None


@dataclass(frozen=True, slots=True)
class Chosen:
    """One dead letter to be changed, and what has to be locked before: its partition, or in `failed_messages` the row itself."""

    id: int
    place: int


def clock(connection: sa.Connection) -> datetime:
    """Return the database's clock, by which all times in the tables are."""
    return connection.execute(sa.select(sa.type_coerce(now(), UtcDateTime()))).scalar_one()


def count(connection: sa.Connection, tables: Tables, selection: Selection) -> int:
    """Return how many there are. Walks all of `*_dead_ix` (of that consumer), and no row that is not dead; locks nothing."""
    query = sa.select(sa.func.count()).select_from(_table(tables, selection)).where(selected(tables, selection))
    return connection.execute(query).scalar_one()


def find(
    connection: sa.Connection, tables: Tables, selection: Selection, *, after: int = 0, limit: int, whole: bool = False
) -> list[dict[str, Any]]:
    """Return dead letters in id order, those with an id above `after`; only if `whole` with payload, headers and failures.

    Walks `*_dead_ix` from `after`, or looks the named ones up in `*_message_id_uq` or `*_message_uq`; locks nothing.
    """
    letter = _table(tables, selection)
    columns = list(letter.c) if whole else [letter.c[name] for name in LISTED if name in letter.c]
    return [dict(row) for row in connection.execute(_next(tables, selection, columns, after, limit)).mappings()]


def choose(connection: sa.Connection, tables: Tables, selection: Selection, *, after: int, limit: int) -> list[Chosen]:
    """Return the next dead letters to be changed, in id order, so that of a key the first is never after the others.

    Walks `*_dead_ix` from `after`, so a run over all of them reads each once. Locks nothing: for the relay's the partitions
    come first, and which these are is only known now. What changes in between, the change itself sees and leaves alone.
    """
    letter = _table(tables, selection)
    columns = [letter.c.id, (letter.c.id if selection.consumer is not None else letter.c.partition).label("place")]
    return [Chosen(row.id, row.place) for row in connection.execute(_next(tables, selection, columns, after, limit))]


def lock_free(connection: sa.Connection, place: sa.ColumnElement[int], places: Collection[int]) -> set[int]:
    """Lock those rows that nobody has locked at this moment, until the end of the transaction; return their places.

    Skips the others, because a relay that settles locks its partitions in whatever order it meets them: were we to wait for
    one with others in hand, and it for one of these, that would be a deadlock. `place` is the primary key of the table. On
    SQLite all are free: whoever has begun a transaction there is the only one that writes.
    """
    free = sa.select(place).where(is_in(connection, place, places)).order_by(place).with_for_update(skip_locked=True)
    return set(connection.execute(free).scalars())


def lock_one(connection: sa.Connection, place: sa.ColumnElement[int], which: int) -> set[int]:
    """Wait for one row, and lock it until the end of the transaction. Only for a transaction that has locked no other.

    A row that is no longer there needs no lock, and counts as locked.
    """
    connection.execute(sa.select(place).where(place == which).with_for_update())
    return {which}


def retry(connection: sa.Connection, tables: Tables, selection: Selection, ids: Collection[int]) -> int:
    """Make those of these messages that are still selected deliverable, as if they had never failed; return how many.

    Their failures stay on record. Needs the locks of their partitions. Looks the ids up in `outbox_message_dead_ix` or `_pk`,
    and locks the rows; nobody else changes dead ones without the lock of their partition, so it waits for nobody.
    """
    message = tables.message
    afresh = {
        "state": State.PENDING,
        "attempts": 0,
        "available_at": now(),
        "dead_at": None,
        "holds": False,
        "again": message.c.partition,
    }
    retried = connection.execute(
        sa.update(message)
        .where(is_in(connection, message.c.id, ids), selected(tables, selection))
        .values(**afresh, last_error=None, error_class=None)
        .returning(message.c.id)
    )
    return len(retried.all())


def discard(connection: sa.Connection, tables: Tables, selection: Selection, ids: Collection[int]) -> tuple[int, set[str]]:
    """Delete those of these messages that are still selected; return how many, and the keys that they have held back.

    Needs the locks of their partitions. Finds and locks rows like `retry`.
    """
    message = tables.message
    discarded = connection.execute(
        sa.delete(message)
        .where(is_in(connection, message.c.id, ids), selected(tables, selection))
        .returning(message.c.key, message.c.holds)
    ).all()
    return len(discarded), {row.key for row in discarded if row.holds}


def selected(tables: Tables, selection: Selection) -> sa.ColumnElement[bool]:
    """Return the condition that a dead letter meets which is selected."""
    meets = _meets(_table(tables, selection), selection)
    return meets if selection.consumer is None else sa.and_(tables.failed.c.consumer == selection.consumer, meets)


def _meets(letter: sa.Table, selection: Selection) -> sa.ColumnElement[bool]:
    # The literal lets the planner prove that the partial index covers the query.
    conditions = [letter.c.state == sa.literal_column(f"'{State.DEAD}'")]
    if selection.message_ids:
        conditions.append(letter.c.message_id.in_(selection.message_ids))
    if selection.topics is not None:
        # Each word with its dot, also the last one, so that `#` can be any number of them, none included.
        conditions.append((letter.c.topic + ".").regexp_match(_expression(selection.topics)))
    if selection.key is not None:
        conditions.append(letter.c.key == selection.key)
    if selection.since is not None:
        conditions.append(letter.c.dead_at >= selection.since)
    if selection.until is not None:
        conditions.append(letter.c.dead_at <= selection.until)
    if selection.error_class is not None:
        conditions.append(letter.c.error_class == selection.error_class)
    return sa.and_(*conditions)


def _table(tables: Tables, selection: Selection) -> sa.Table:
    return tables.message if selection.consumer is None else tables.failed


def _next(
    tables: Tables, selection: Selection, columns: Sequence[sa.ColumnElement[Any]], after: int, limit: int
) -> sa.Select[Any]:
    letter = _table(tables, selection)
    query = sa.select(*columns).where(_meets(letter, selection)).limit(limit)
    if selection.consumer is None:
        return query.where(letter.c.id > after).order_by(letter.c.id)
    # In the order of the index of that consumer, which no other has, see `exactly`; a pair says where in it the walk begins.
    begin = sa.tuple_(letter.c.consumer, letter.c.id) > sa.tuple_(selection.consumer, after)
    return query.where(exactly(letter.c.consumer, selection.consumer), begin).order_by(letter.c.consumer, letter.c.id)


def _expression(pattern: str) -> str:
    """Return the regular expression, of PostgreSQL as well as Python, for a topic pattern as in `outbox.topics`.

    A word of a pattern has no character that means something in it, see `is_pattern`.
    """
    words = {"*": "[^.]+[.]", "#": "([^.]+[.])*"}
    return "^" + "".join(words.get(word, f"{word}[.]") for word in pattern.split(".")) + "$"
