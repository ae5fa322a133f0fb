"""How long the message that should have gone out first has been waiting, without looking at all that wait.

No index is in the order of time, so each look is at where the oldest ones are: the first in line.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import sqlalchemy as sa

from outbox.sqltypes import UtcDateTime, now
from outbox.states import State
from outbox.store.plans import exactly

if TYPE_CHECKING:
    from datetime import datetime

    from outbox.tables import Tables

_IN_LINE = 100
_BACKING_OFF = 10_000
_TOPICS = 1000


def oldest_unsent_s(connection: sa.Connection, tables: Tables) -> float | None:
    """Return the age in seconds of the oldest message that should have been sent by now, or `None`. Locks nothing.

    One that the application delayed counts from when it was due. Exact unless the oldest is behind a hundred younger ones, which
    is only so when these were delayed by the application; or backs off behind ten thousand that are due before it.
    """
    looks = [_pending(tables), _blocked(tables), _backing_off(tables)]
    clock, *found = connection.execute(sa.select(sa.type_coerce(now(), UtcDateTime()), *looks)).one()
    times = [time for time in found if time is not None]
    return max(0.0, round((clock - min(times)).total_seconds(), 3)) if times else None


def oldest_deliverable_s(connection: sa.Connection, tables: Tables, *, in_line: int) -> float | None:
    """Return the age in seconds of the oldest message that could be sent now, or `None`. Locks nothing.

    Like `oldest_unsent_s`, but without what is blocked or backs off, and it looks at no more than `in_line` messages of a partition.
    """
    looks: list[Any] = [sa.type_coerce(now(), UtcDateTime()), _pending(tables, in_line)]
    clock, since = connection.execute(sa.select(*looks)).one()
    return None if since is None else max(0.0, round((clock - since).total_seconds(), 3))


def _pending(tables: Tables, in_line: int = _IN_LINE) -> sa.ScalarSelect[datetime]:
    """Walk the first of each partition in `outbox_message_pending_ix`."""
    message, partition = tables.message.alias("waiting"), tables.partition
    first = (
        _waiting_since(message, State.PENDING)
        .where(exactly(message.c.partition, partition.c.partition))
        .order_by(message.c.partition, message.c.id)
        .limit(in_line)
    )
    return _earliest(sa.select(_earliest(first.correlate(partition)).label("since")).select_from(partition))


def _blocked(tables: Tables) -> sa.ScalarSelect[datetime]:
    """Walk the first of each topic in `outbox_message_blocked_ix`."""
    message, topics = tables.message.alias("waiting"), _blocked_topics(tables)
    first = (
        _waiting_since(message, State.BLOCKED)
        .where(exactly(message.c.topic, topics.c.topic))
        .order_by(message.c.topic, message.c.id)
        .limit(_IN_LINE)
    )
    return _earliest(sa.select(_earliest(first.correlate(topics)).label("since")).select_from(topics))


def _blocked_topics(tables: Tables) -> sa.Subquery:
    """Return the topics that have blocked messages: each is found by one probe of `outbox_message_blocked_ix` after the last."""
    message = tables.message.alias("next")
    first = sa.select(message.c.topic).where(_in_state(message, State.BLOCKED)).order_by(message.c.topic, message.c.id).limit(1)
    topics = sa.select(first.scalar_subquery().label("topic")).cte("topics", recursive=True)
    following = first.where(message.c.topic > topics.c.topic).correlate(topics).scalar_subquery()
    topics = topics.union_all(sa.select(following).select_from(topics).where(topics.c.topic.is_not(None)))
    return sa.select(topics.c.topic).where(topics.c.topic.is_not(None)).limit(_TOPICS).subquery("each_topic")


def _backing_off(tables: Tables) -> sa.ScalarSelect[datetime]:
    """Walk the first of `outbox_message_scheduled_ix`, and take no account of what the application has delayed."""
    message = tables.message.alias("waiting")
    since = sa.case((message.c.last_error.is_not(None), message.c.created_at)).label("since")
    first = sa.select(since).where(_in_state(message, State.SCHEDULED)).order_by(message.c.available_at)
    return _earliest(first.limit(_BACKING_OFF))


def _waiting_since(message: sa.FromClause, state: State) -> sa.Select[Any]:
    since = sa.case((message.c.last_error.is_(None), message.c.available_at), else_=message.c.created_at).label("since")
    return sa.select(since).where(_in_state(message, state))


def _in_state(message: sa.FromClause, state: State) -> sa.ColumnElement[bool]:
    # The literal lets the planner prove that the partial index covers the query.
    return message.c.state == sa.literal_column(f"'{state}'")


def _earliest(times: sa.Select[Any]) -> sa.ScalarSelect[datetime]:
    found = times.subquery()
    return sa.select(sa.func.min(found.c.since, type_=UtcDateTime())).scalar_subquery()
