"""Claiming: a short lease on a few partitions, and what is unsent in them."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import lru_cache
from operator import attrgetter
from typing import TYPE_CHECKING, Any, NamedTuple

import sqlalchemy as sa

from outbox.identity import PARTITIONS
from outbox.outgoing import Outgoing
from outbox.sqltypes import SessionDateTime, later, now, seconds_since
from outbox.states import PARKED, State
from outbox.store import pauses
from outbox.store.dialects import are_given, as_json, given, listed, numbered
from outbox.store.payloads import headers_if_sendable, payload_if_small, with_large_payloads
from outbox.store.plans import exactly, first_id
from outbox.tables import HELD, SCHEMA_VERSION

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping, Sequence
    from uuid import UUID

    from sqlalchemy.types import TypeEngine

    from outbox.tables import Tables


NO_LOWS = (0,) * PARTITIONS
"""Every partition from its start."""


def lease_partitions(
    connection: sa.Connection,
    tables: Tables,
    *,
    owner: str,
    lease_s: float,
    most: int,
    most_beside: int | None = None,
    lows: Sequence[int] = NO_LOWS,
    gone: Collection[str] = (),
) -> dict[int, int]:
    """Lease up to `most` partitions that have pending messages, the least recently served first; return their tokens.

    `most_beside`: so many while others hold leases (default: as many), or a few relays would have all, and the rest polls in vain.

    Reads the 64 rows of `outbox_partition`, with one probe of `outbox_message_pending_ix`, from the partition's place in `lows`
    on, and one of `outbox_message_again_ix` for each that is free. The leases of those who are `gone` count as free.
    Locks the rows that it takes and skips those that another relay is taking at this moment. The choice is a CTE, because
    a subquery in the WHERE could be run again for every row of an unlucky plan, and lease more than asked for.
    """
    values = {
        "lows": given(connection.dialect.name, lows),
        "owner": owner,
        "lease_s": lease_s,
        "most": most,
        "most_beside": most if most_beside is None else most_beside,
        "gone": given(connection.dialect.name, list(gone)),
    }
    taken = connection.execute(_lease_partitions(tables, connection.dialect.name), values)
    return {row.partition: row.lease_token for row in taken}


@lru_cache
def _lease_partitions(tables: Tables, dialect: str) -> sa.Update:
    partition, message = tables.partition, tables.message.alias("waiting")
    cursor = numbered(dialect, "lows")
    ahead = first_id(message, message.c.partition, partition.c.partition, _pending(message), message.c.id >= cursor.c.value)
    behind = first_id(message, message.c.again, partition.c.partition, _pending(message))
    left = are_given(dialect, partition.c.lease_owner, "gone")
    free = sa.or_(partition.c.lease_until.is_(None), partition.c.lease_until < now(), left)
    other = partition.alias("other")
    at_work = sa.and_(other.c.lease_until >= now(), other.c.lease_owner != sa.bindparam("owner", type_=sa.Text()))
    most, most_beside = (sa.bindparam(name, type_=sa.Integer()) for name in ("most", "most_beside"))
    limit = sa.select(sa.case((sa.exists().where(at_work), most_beside), else_=most)).scalar_subquery()
    chosen = (
        sa.select(partition.c.partition)
        .join(cursor, cursor.c.place == partition.c.partition)
        .where(free, sa.or_(ahead.is_not(None), behind.is_not(None)))
        .order_by(partition.c.served_at.asc().nulls_first(), partition.c.partition)
        .limit(limit)
        .with_for_update(skip_locked=True, of=partition)
        .cte("chosen")
    )
    lease = {
        "lease_owner": sa.bindparam("owner", type_=sa.Text()),
        "lease_token": partition.c.lease_token + 1,
        "lease_until": later(sa.bindparam("lease_s", type_=sa.Float())),
        "served_at": now(),
    }
    update = sa.update(partition).where(partition.c.partition.in_(sa.select(chosen.c.partition))).values(lease)
    return update.returning(partition.c.partition, partition.c.lease_token)


def unsent(
    connection: sa.Connection, tables: Tables, partitions: Iterable[int], *, limit: int, lows: Sequence[int] = NO_LOWS
) -> Unsent:
    """Return the pending messages of some partitions, the first `limit` of each or more, as many as fit in memory.

    A statement of its own after the lease, so that its snapshot is newer than the lock: otherwise it could see messages that the
    last holder has just settled, and miss what was paused before it (see `pauses.is_active`). Walks `outbox_message_pending_ix` once
    for each partition, from its place in `lows` on, and `outbox_message_again_ix` up to there, and probes `outbox_message_held_ix`
    once for each message that has a key. Both in one statement: were they two, a message that comes back from a backoff between them
    would be seen by neither, and overtaken. Reads the handful of rows of `outbox_pause` once. Locks nothing.
    """
    asked = [{"place": place, "low": lows[place]} for place in partitions]
    if not asked:
        return Unsent([], [])
    if connection.dialect.name == "sqlite":
        each = [row for one in asked for row in connection.execute(_unsent_of_one(tables), {**one, "most": limit})]
        rows, paused = list(map(Outgoing._make, each)), pauses.active(connection, tables)
    else:
        found = connection.execute(_unsent(tables), {"asked": as_json(asked), "most": limit}).all()
        rows = [Outgoing._make(row[1:]) for row in found]
        paused = json.loads(found[0].paused or "[]") if found else []
    return Unsent(with_large_payloads(connection, tables, sorted(rows, key=_id)), paused)


class Unsent(NamedTuple):
    """Pending messages in id order, and the patterns of topics that are paused."""

    rows: list[Outgoing]
    paused: list[str]


@lru_cache
def _unsent(tables: Tables) -> sa.Select[Any]:
    asked = listed("postgresql", sa.bindparam("asked", type_=sa.Text()), place=sa.SmallInteger(), low=sa.BigInteger())
    first = _first(tables, asked.c.place, asked.c.low, asked).lateral("first")
    topics = sa.select(sa.cast(sa.func.json_agg(tables.pause.c.topics), sa.Text())).where(pauses.is_active(tables))
    return sa.select(topics.scalar_subquery().label("paused"), *first.c).select_from(asked.join(first, sa.true()))


@lru_cache
def _unsent_of_one(tables: Tables) -> sa.CompoundSelect[Any]:
    """Return the same for one partition. On SQLite, which has no LATERAL, nothing else is written between one and the next."""
    return _first(tables, sa.bindparam("place", type_=sa.SmallInteger()), sa.bindparam("low", type_=sa.BigInteger()))


def _first(tables: Tables, place: Any, low: Any, *outer: sa.FromClause) -> sa.CompoundSelect[Any]:
    message = tables.message
    earlier = message.alias("earlier")
    read = {column.name: column for column in message.c} | {
        "payload": payload_if_small(message),
        "headers": headers_if_sendable(message),
        "created_at": sa.type_coerce(message.c.created_at, SessionDateTime()).label("created_at"),
        "age_s": seconds_since(message.c.created_at).label("age_s"),
        "held_id": first_id(earlier, earlier.c.key, message.c.key, sa.text(HELD)).label("held_id"),
    }
    columns = [read[name] for name in Outgoing._fields]
    most = sa.bindparam("most", type_=sa.Integer)
    each: list[sa.Select[Any]] = []
    for place_of, half in ((message.c.partition, message.c.id >= low), (message.c.again, message.c.id < low)):
        first = sa.select(*columns).where(_pending(message), exactly(place_of, place), half)
        first = first.order_by(place_of, message.c.id).limit(most).correlate(*outer)
        each.append(sa.select(*first.subquery(f"p{len(each)}").c))
    return sa.union_all(*each)


def writers(connection: sa.Connection, tables: Tables) -> frozenset[str]:
    """Return the transactions that are writing to the messages at this moment, the connection's own among them.

    Each has held its lock on the table since before it took the first id, and holds it until it ends. Only on PostgreSQL: on
    SQLite whoever has begun a transaction is the only one that writes.
    """
    if connection.dialect.name != "postgresql":
        return frozenset()
    name = connection.dialect.identifier_preparer.format_table(tables.message)
    query = sa.text(
        "SELECT virtualtransaction FROM pg_locks WHERE locktype = 'relation' AND relation = CAST(:name AS regclass)"
        " AND database = (SELECT oid FROM pg_database WHERE datname = current_database())"
        " AND mode IN ('RowExclusiveLock', 'ShareRowExclusiveLock', 'ExclusiveLock', 'AccessExclusiveLock')"
    )
    return frozenset(connection.execute(query, {"name": name}).scalars())


def left_behind(connection: sa.Connection, tables: Tables, lows: Sequence[int], places: Mapping[int, int]) -> set[int]:
    """Return those of the partitions in which there is still a pending message between `lows` and the place given for each.

    One probe of `outbox_message_pending_ix` for each, past the entries of what was published in between.
    """
    message = tables.message
    rows = [{"place": place, "low": lows[place], "high": high} for place, high in places.items()]
    bounds = listed(connection.dialect.name, rows, place=sa.SmallInteger(), low=sa.BigInteger(), high=sa.BigInteger())
    between = (message.c.id >= bounds.c.low, message.c.id < bounds.c.high)
    found = first_id(message, message.c.partition, bounds.c.place, _pending(message), *between)
    return set(connection.execute(sa.select(bounds.c.place).where(found.is_not(None))).scalars())


@dataclass(frozen=True, slots=True)
class Holder:
    """The first message of a key that holds back the later ones."""

    id: int
    key: str
    message_id: UUID
    topic: str
    state: State
    parked: bool


def holders(connection: sa.Connection, tables: Tables, keys: Collection[str]) -> dict[str, Holder]:
    """Return what holds back these keys: for each, one probe of `outbox_message_held_ix`, however many wait behind it.

    The ids are an array, so that the planner can only look them up in `outbox_message_pk`.
    """
    message = tables.message
    each = message.alias("each")
    asked = listed(connection.dialect.name, [{"held_key": key} for key in keys], held_key=sa.Text())
    ids = sa.select(first_id(each, each.c.key, asked.c.held_key, sa.text(HELD)).label("id")).select_from(asked)
    sqlite = connection.dialect.name == "sqlite"
    first = message.c.id.in_(ids) if sqlite else message.c.id == sa.any_(sa.func.array(ids.scalar_subquery()))
    rows = connection.execute(sa.select(*(message.c[name] for name in _HOLDER)).where(first))
    return {
        row.key: Holder(row.id, row.key, row.message_id, row.topic, State(row.state), row.error_class == PARKED) for row in rows
    }


def renew(connection: sa.Connection, tables: Tables, leases: Mapping[int, int], *, lease_s: float) -> set[int]:
    """Prolong the leases that still carry their token; return the partitions that are still held."""
    partition = tables.partition
    lease = listed(connection.dialect.name, [{"place": place, "token": token} for place, token in leases.items()], **LEASE)
    renewed = sa.update(partition).where(is_held(tables, lease)).values(lease_until=later(sa.literal(lease_s, sa.Float)))
    return set(connection.execute(renewed.returning(partition.c.partition)).scalars())


def is_held(tables: Tables, lease: sa.FromClause) -> sa.ColumnElement[bool]:
    """Return the condition that joins those of the `listed` leases that still carry their token."""
    partition = tables.partition
    return sa.and_(
        partition.c.partition == lease.c.place, partition.c.lease_token == lease.c.token, partition.c.lease_owner.is_not(None)
    )


def _pending(message: sa.FromClause) -> sa.ColumnElement[bool]:
    # The literal lets the planner prove that the partial index covers the query.
    return sa.and_(message.c.state == sa.literal_column(f"'{State.PENDING}'"), message.c.schema_version <= SCHEMA_VERSION)


LEASE: dict[str, TypeEngine[Any]] = {"place": sa.SmallInteger(), "token": sa.BigInteger()}
"""What a lease is as a row of `listed`."""

_id = attrgetter("id")
_HOLDER = ("id", "key", "message_id", "topic", "state", "error_class")
