"""What stands in the tables that somebody should know of. Reads only, so many rows of a kind and no more; locks nothing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import sqlalchemy as sa

from outbox.sqltypes import UtcDateTime, later
from outbox.states import State
from outbox.store.dead import clock
from outbox.store.plans import exactly, first_id
from outbox.store.stats import MOST_COUNTED
from outbox.tables import HELD, SCHEMA_VERSION

if TYPE_CHECKING:
    from datetime import datetime

    from outbox.tables import Tables

_TOPICS = 1000
_HOLDERS = 1000


@dataclass(frozen=True, slots=True)
class Dead:
    """The dead letters, the first `MOST_COUNTED` at most: how many, how long ago in seconds the first died, and of what."""

    count: int
    oldest_s: float
    error_classes: dict[str, int]


def dead(connection: sa.Connection, tables: Tables) -> Dead | None:
    """Look at the dead letters; `None` if there are none. Walks `outbox_message_dead_ix` from its start."""
    message = tables.message
    some = _in_state(tables, State.DEAD, message.c.error_class, message.c.dead_at).order_by(message.c.id).limit(MOST_COUNTED)
    first = some.subquery()
    number = sa.func.count().label("number")
    since = sa.func.min(first.c.dead_at, type_=UtcDateTime()).label("since")
    rows = connection.execute(sa.select(first.c.error_class, number, since).group_by(first.c.error_class)).all()
    if not rows:
        return None
    classes = {row.error_class or "unknown": row.number for row in sorted(rows, key=lambda row: -row.number)}
    return Dead(sum(classes.values()), _seconds_since(connection, min(row.since for row in rows)), classes)


def held_by_dead(connection: sa.Connection, tables: Tables) -> list[str]:
    """Return keys of which messages wait behind a dead one, among the first thousand dead ones that hold back their key.

    Walks `outbox_message_dead_ix`, with a probe of `outbox_message_held_ix` for each.
    """
    message = tables.message
    waiting = message.alias("waiting")
    dead_ones = _in_state(tables, State.DEAD, message.c.key, message.c.id).where(message.c.holds)
    some = dead_ones.order_by(message.c.id).limit(_HOLDERS).subquery()
    blocked = waiting.c.state == sa.literal_column(f"'{State.BLOCKED}'")
    behind = first_id(waiting, waiting.c.key, some.c.key, sa.text(f"waiting.{HELD}"), blocked, waiting.c.id > some.c.id)
    query = sa.select(some.c.key).where(behind.is_not(None)).distinct().order_by(some.c.key)
    return list(connection.execute(query).scalars())


def blocked_topics(connection: sa.Connection, tables: Tables) -> dict[str, int]:
    """Return how many messages of each topic are blocked, each counted up to `MOST_COUNTED`.

    Probes `outbox_message_blocked_ix` once for each topic, and walks its part of it.
    """
    message = tables.message
    found: dict[str, int] = {}
    topic: str | None = ""
    while len(found) < _TOPICS:
        after = _in_state(tables, State.BLOCKED, message.c.topic).where(message.c.topic > topic)
        topic = connection.execute(after.order_by(message.c.topic, message.c.id).limit(1)).scalar_one_or_none()
        if topic is None:
            break
        mine = _in_state(tables, State.BLOCKED, message.c.id).where(exactly(message.c.topic, topic))
        some = mine.order_by(message.c.topic, message.c.id).limit(MOST_COUNTED).subquery()
        found[topic] = connection.execute(sa.select(sa.func.count()).select_from(some)).scalar_one()
    return found


def scheduled_after(connection: sa.Connection, tables: Tables, seconds: float) -> tuple[int, datetime] | None:
    """Return how many messages are due later than in so many seconds, up to `MOST_COUNTED`, and when the last one is.

    Walks `outbox_message_scheduled_ix` from its end.
    """
    message = tables.message
    far = _in_state(tables, State.SCHEDULED, message.c.available_at)
    far = far.where(message.c.available_at > later(sa.literal(seconds, sa.Float)))
    some = far.order_by(message.c.available_at.desc()).limit(MOST_COUNTED).subquery()
    latest = sa.func.max(some.c.available_at, type_=UtcDateTime())
    number, last = connection.execute(sa.select(sa.func.count(), latest).select_from(some)).one()
    return (number, last) if number else None


def newest_version(connection: sa.Connection, tables: Tables) -> int:
    """Return the highest schema version among the first messages of each partition, `MOST_COUNTED` in all, that are pending."""
    message = tables.message
    some = _in_state(tables, State.PENDING, message.c.schema_version).order_by(message.c.partition, message.c.id)
    first = some.limit(MOST_COUNTED).subquery()
    return connection.execute(sa.select(sa.func.max(first.c.schema_version))).scalar_one() or SCHEMA_VERSION


def topics(connection: sa.Connection, tables: Tables) -> list[tuple[str, str]]:
    """Return topics and types of the messages that are there, as far as the first ones in each state show them."""
    message = tables.message
    orders: dict[State, list[Any]] = {
        State.PENDING: [message.c.partition, message.c.id],
        State.SCHEDULED: [message.c.available_at],
        State.BLOCKED: [message.c.topic, message.c.id],
        State.SENT: [message.c.sent_at.desc()],
        State.DEAD: [message.c.id],
    }
    each = [
        sa.select(
            *_in_state(tables, state, message.c.topic, message.c.type)
            .order_by(*order)
            .limit(MOST_COUNTED)
            .subquery(state.value)
            .c
        )
        for state, order in orders.items()
    ]
    seen = sa.union(*each).limit(_TOPICS)
    return sorted((row.topic, row.type) for row in connection.execute(seen))


def consumers(connection: sa.Connection, tables: Tables) -> list[str]:
    """Return the consumers that have failed messages. One probe of `failed_messages_message_uq` for each."""
    failed = tables.failed
    found: list[str] = []
    while len(found) < _TOPICS:
        query = sa.select(failed.c.consumer).where(failed.c.consumer > (found[-1] if found else ""))
        following = connection.execute(query.order_by(failed.c.consumer, failed.c.message_id).limit(1)).scalar_one_or_none()
        if following is None:
            break
        found.append(following)
    return found


def overdue_s(connection: sa.Connection, tables: Tables, consumer: str) -> float:
    """Return for how many seconds the next try of a consumer's message has been due; 0 if none is. Probes `failed_messages_due_ix`."""
    failed = tables.failed
    due = sa.select(failed.c.available_at).where(
        exactly(failed.c.consumer, consumer), failed.c.state == sa.literal_column("'retry'")
    )
    first = connection.execute(due.order_by(failed.c.consumer, failed.c.available_at).limit(1)).scalar_one_or_none()
    return 0.0 if first is None else _seconds_since(connection, first)


def oldest_record_s(connection: sa.Connection, tables: Tables) -> float | None:
    """Return how many seconds ago the first of the handled messages that are remembered was. Probes `processed_messages_processed_at_ix`."""
    first = sa.select(tables.processed.c.processed_at).order_by(tables.processed.c.processed_at).limit(1)
    found = connection.execute(first).scalar_one_or_none()
    return None if found is None else _seconds_since(connection, found)


def _in_state(tables: Tables, state: State, *columns: sa.ColumnElement[Any]) -> sa.Select[Any]:
    # The literal lets the planner prove that the partial index covers the query.
    return sa.select(*columns).where(tables.message.c.state == sa.literal_column(f"'{state}'"))


def _seconds_since(connection: sa.Connection, then: datetime) -> float:
    return max(0.0, (clock(connection) - then).total_seconds())
