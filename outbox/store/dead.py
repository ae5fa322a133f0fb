"""The dead letters: finding them, and giving them another chance or up for good.

Who changes one first locks the row of its partition in `outbox_partition`, as a relay does that claims or settles. So no relay
can let a message wait behind a dead one that is being discarded at the same moment, and then nobody would let it go on.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import sqlalchemy as sa

from outbox.sqltypes import UtcDateTime, now
from outbox.states import State
from outbox.store.dialects import is_in

if TYPE_CHECKING:
    from collections.abc import Collection
    from datetime import datetime
    from uuid import UUID

    from outbox.tables import Tables

LISTED = ("id", "message_id", "topic", "key", "attempts", "created_at", "dead_at", "error_class", "last_error")


@dataclass(frozen=True, slots=True)
class Selection:
    """Which dead letters: those that meet all that is given. `topics` is a pattern; `since` and `until` bound `dead_at`."""

    message_ids: tuple[UUID, ...] = ()
    topics: str | None = None
    key: str | None = None
    since: datetime | None = None
    until: datetime | None = None
    error_class: str | None = None


@dataclass(frozen=True, slots=True)
class Chosen:
    """One dead letter to be changed, and the partition that has to be locked before."""

    id: int
    partition: int


def clock(connection: sa.Connection) -> datetime:
    """Return the database's clock, by which all times in the tables are."""
    return connection.execute(sa.select(sa.type_coerce(now(), UtcDateTime()))).scalar_one()


def count(connection: sa.Connection, tables: Tables, selection: Selection) -> int:
    """Return how many there are. Walks all of `outbox_message_dead_ix`, and no row that is not dead; locks nothing."""
    query = sa.select(sa.func.count()).select_from(tables.message).where(_selected(tables, selection))
    return connection.execute(query).scalar_one()


def find(
    connection: sa.Connection, tables: Tables, selection: Selection, *, after: int = 0, limit: int, whole: bool = False
) -> list[dict[str, Any]]:
    """Return dead letters in id order, those with an id above `after`; only if `whole` with payload, headers and failures.

    Walks `outbox_message_dead_ix` from `after`, or looks the named ones up in `outbox_message_message_id_uq`; locks nothing.
    """
    message = tables.message
    columns = message.c if whole else [message.c[name] for name in LISTED]
    query = sa.select(*columns).where(_selected(tables, selection), message.c.id > after).order_by(message.c.id).limit(limit)
    return [dict(row) for row in connection.execute(query).mappings()]


def choose(connection: sa.Connection, tables: Tables, selection: Selection, *, after: int, limit: int) -> list[Chosen]:
    """Return the next dead letters to be changed, in id order, so that of a key the first is never after the others.

    Walks `outbox_message_dead_ix` from `after`, so a run over all of them reads each once. Locks nothing: the partitions come
    first, and which these are is only known now. What changes in between, the change itself sees and leaves alone.
    """
    message = tables.message
    query = sa.select(message.c.id, message.c.partition).where(_selected(tables, selection), message.c.id > after)
    return [Chosen(row.id, row.partition) for row in connection.execute(query.order_by(message.c.id).limit(limit))]


def lock_free(connection: sa.Connection, tables: Tables, partitions: Collection[int]) -> set[int]:
    """Lock those of these partitions that nobody has locked at this moment, until the end of the transaction; return them.

    Skips the others, because a relay that settles locks its partitions in whatever order it meets them: were we to wait for
    one with others in hand, and it for one of these, that would be a deadlock. Walks `outbox_partition_pk`. On SQLite all are
    free: whoever has begun a transaction there is the only one that writes.
    """
    place = tables.partition.c.partition
    free = sa.select(place).where(is_in(connection, place, partitions)).order_by(place).with_for_update(skip_locked=True)
    return set(connection.execute(free).scalars())


def lock_one(connection: sa.Connection, tables: Tables, partition: int) -> set[int]:
    """Wait for one partition, and lock it until the end of the transaction. Only for a transaction that has locked nothing."""
    place = tables.partition.c.partition
    connection.execute(sa.select(place).where(place == partition).with_for_update())
    return {partition}


def retry(connection: sa.Connection, tables: Tables, selection: Selection, ids: Collection[int]) -> int:
    """Make those of these messages that are still selected deliverable, as if they had never failed; return how many.

    Their failures stay on record. Needs the locks of their partitions. Looks the ids up in `outbox_message_dead_ix` or `_pk`,
    and locks the rows; nobody else changes dead ones without the lock of their partition, so it waits for nobody.
    """
    message = tables.message
    afresh = {"state": State.PENDING, "attempts": 0, "available_at": now(), "dead_at": None, "holds": False, "again": True}
    retried = connection.execute(
        sa.update(message)
        .where(is_in(connection, message.c.id, ids), _selected(tables, selection))
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
        .where(is_in(connection, message.c.id, ids), _selected(tables, selection))
        .returning(message.c.key, message.c.holds)
    ).all()
    return len(discarded), {row.key for row in discarded if row.holds}


def _selected(tables: Tables, selection: Selection) -> sa.ColumnElement[bool]:
    message = tables.message
    # The literal lets the planner prove that the partial index covers the query.
    conditions = [message.c.state == sa.literal_column(f"'{State.DEAD}'")]
    if selection.message_ids:
        conditions.append(message.c.message_id.in_(selection.message_ids))
    if selection.topics is not None:
        # Each word with its dot, also the last one, so that `#` can be any number of them, none included.
        conditions.append((message.c.topic + ".").regexp_match(_expression(selection.topics)))
    if selection.key is not None:
        conditions.append(message.c.key == selection.key)
    if selection.since is not None:
        conditions.append(message.c.dead_at >= selection.since)
    if selection.until is not None:
        conditions.append(message.c.dead_at <= selection.until)
    if selection.error_class is not None:
        conditions.append(message.c.error_class == selection.error_class)
    return sa.and_(*conditions)


def _expression(pattern: str) -> str:
    """Return the regular expression, of PostgreSQL as well as Python, for a topic pattern as in `outbox.topics`.

    A word of a pattern has no character that means something in it, see `is_pattern`.
    """
    words = {"*": "[^.]+[.]", "#": "([^.]+[.])*"}
    return "^" + "".join(words.get(word, f"{word}[.]") for word in pattern.split(".")) + "$"
