"""How a consumer stands, for people and monitoring. Reads only, at most so many rows of a kind; locks nothing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import sqlalchemy as sa

from outbox.sqltypes import UtcDateTime
from outbox.sqltypes import now as the_clock
from outbox.store.dead import LISTED, clock
from outbox.store.plans import exactly
from outbox.store.stats import MOST_COUNTED

if TYPE_CHECKING:
    from datetime import datetime

    from outbox.tables import Tables


@dataclass(frozen=True, slots=True)
class ConsumerStats:
    """One look at a consumer. What is `counted_up_to` or more is not counted further.

    `messages` counts the failed messages by state. `oldest_waiting_s` is how long ago, in seconds, the oldest of those counted was
    received that is to be tried again or waits behind another, or None. `leases` are being held by workers, `expired` ones were
    left by workers that died, and are taken over at the next delivery. `newest_dead` is the last one given up among those last
    received that are dead, that many at most.
    """

    messages: dict[str, int]
    oldest_waiting_s: float | None
    leases: int
    expired: int
    newest_dead: dict[str, Any] | None
    counted_up_to: int


def consumer_stats(connection: sa.Connection, tables: Tables, consumer: str) -> ConsumerStats:
    """Look at a consumer.

    What is counted is read from `failed_messages_due_ix`, `_dead_ix` and `processed_messages_processing_ix`, so much and no
    more; what is blocked from `_key_ix`, past everything else that has a key.
    """
    failed, processed = tables.failed, tables.processed
    orders = {"retry": [failed.c.available_at], "blocked": [failed.c.key, failed.c.id], "dead": [failed.c.id]}
    found = {state: _failed(connection, tables, consumer, state, order) for state, order in orders.items()}
    waiting = [oldest for state, (_number, oldest) in found.items() if state != "dead" and oldest is not None]
    age = (clock(connection) - min(waiting)).total_seconds() if waiting else None
    return ConsumerStats(
        messages={state: number for state, (number, _oldest) in found.items()},
        oldest_waiting_s=None if age is None else max(0.0, round(age, 3)),
        leases=_leases(connection, tables, consumer, processed.c.lease_until > the_clock()),
        expired=_leases(connection, tables, consumer, processed.c.lease_until <= the_clock()),
        newest_dead=_newest_dead(connection, tables, consumer),
        counted_up_to=MOST_COUNTED,
    )


def _failed(
    connection: sa.Connection, tables: Tables, consumer: str, state: str, order: list[sa.Column[Any]]
) -> tuple[int, datetime | None]:
    failed = tables.failed
    wanted = [exactly(failed.c.consumer, consumer), failed.c.state == sa.literal_column(f"'{state}'")]
    if state == "blocked":
        wanted.append(failed.c.key.is_not(None))
    some = sa.select(failed.c.received_at).where(*wanted).order_by(failed.c.consumer, *order).limit(MOST_COUNTED).subquery()
    oldest = sa.func.min(some.c.received_at, type_=UtcDateTime())
    number, since = connection.execute(sa.select(sa.func.count(), oldest).select_from(some)).one()
    return number, since


def _leases(connection: sa.Connection, tables: Tables, consumer: str, which: sa.ColumnElement[bool]) -> int:
    processed = tables.processed
    mine = [exactly(processed.c.consumer, consumer), processed.c.state == sa.literal_column("'processing'"), which]
    order = (processed.c.consumer, processed.c.lease_until)
    some = sa.select(processed.c.lease_until).where(*mine).order_by(*order).limit(MOST_COUNTED).subquery()
    return connection.execute(sa.select(sa.func.count()).select_from(some)).scalar_one()


def _newest_dead(connection: sa.Connection, tables: Tables, consumer: str) -> dict[str, Any] | None:
    failed = tables.failed
    listed = [failed.c[name] for name in LISTED if name in failed.c]
    mine = [exactly(failed.c.consumer, consumer), failed.c.state == sa.literal_column("'dead'")]
    last = sa.select(*listed).where(*mine).order_by(failed.c.consumer.desc(), failed.c.id.desc()).limit(MOST_COUNTED).subquery()
    newest = sa.select(last).order_by(last.c.dead_at.desc(), last.c.id.desc()).limit(1)
    row = connection.execute(newest).mappings().one_or_none()
    return None if row is None else dict(row)


@dataclass(frozen=True, slots=True)
class FailedCounts:
    """A consumer's failed messages by state; of those in `capped` there may be more."""

    messages: dict[str, int]
    capped: frozenset[str]


def failed_counts(connection: sa.Connection, tables: Tables, consumer: str, *, most: int) -> FailedCounts:
    """Count the failed messages of a consumer, reading no more than `most` rows for each state.

    By `failed_messages_due_ix` and `_dead_ix`. What is blocked has no index of its own: it is counted among the first `most` of
    `_key_ix`, so there may be more whenever so many have a key.
    """
    failed = tables.failed
    mine = exactly(failed.c.consumer, consumer)
    numbers: dict[str, int] = {}
    for state, order in (("retry", failed.c.available_at), ("dead", failed.c.id)):
        these = sa.select(failed.c.consumer).where(mine, failed.c.state == sa.literal_column(f"'{state}'"))
        some = these.order_by(failed.c.consumer, order).limit(most).subquery()
        numbers[state] = connection.execute(sa.select(sa.func.count()).select_from(some)).scalar_one()
    keyed = sa.select(failed.c.state).where(mine, failed.c.key.is_not(None))
    some = keyed.order_by(failed.c.consumer, failed.c.key, failed.c.id).limit(most).subquery()
    blocked = sa.func.count(sa.case((some.c.state == "blocked", 1)))
    read, numbers["blocked"] = connection.execute(sa.select(sa.func.count(), blocked).select_from(some)).one()
    capped = {state for state in ("retry", "dead") if numbers[state] >= most} | ({"blocked"} if read >= most else set())
    return FailedCounts(numbers, frozenset(capped))
