"""The registry: which relays are at work, and what they say of the broker. Each relay writes its own row alone."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

import sqlalchemy as sa

from outbox.sqltypes import UtcDateTime, later, now

if TYPE_CHECKING:
    from outbox.tables import Tables

SILENT_AFTER_S = 60.0
"""A relay that has not been seen for so long is shown as silent."""


class Broker(StrEnum):
    """How a relay finds the broker; the words that `outbox_relay.broker` holds."""

    CONNECTED = "connected"
    UNREACHABLE = "unreachable"
    BLOCKED = "blocked"  # connected, but a memory or disk alarm makes it take nothing


@dataclass(frozen=True, slots=True)
class Seen:
    """A relay as it has last written itself down. `silent`: that was more than a minute ago, so it is hung, cut off or gone."""

    owner: str
    version: str
    broker: str
    running_s: float
    seen_ago_s: float
    silent: bool


def note(connection: sa.Connection, tables: Tables, *, owner: str, version: str, broker: Broker) -> None:
    """Write down that a relay is at work. By `outbox_relay_pk`; no other relay writes this row."""
    relay = tables.relay
    seen = sa.update(relay).where(relay.c.owner == owner).values(broker=broker, version=version, seen_at=now())
    if not connection.execute(seen).rowcount:
        connection.execute(sa.insert(relay).values(owner=owner, version=version, broker=broker))


def leave(connection: sa.Connection, tables: Tables, *, owner: str) -> None:
    """Forget a relay that stops in order."""
    connection.execute(sa.delete(tables.relay).where(tables.relay.c.owner == owner))


def relays(connection: sa.Connection, tables: Tables) -> list[Seen]:
    """Return the relays, by the database's clock. Locks nothing."""
    relay = tables.relay
    clock = sa.type_coerce(now(), UtcDateTime())
    rows = connection.execute(sa.select(relay, clock.label("clock")).order_by(relay.c.owner)).all()
    return [_seen(row) for row in rows]


def alive(connection: sa.Connection, tables: Tables) -> int:
    """Count the relays that are not silent, by the database's clock. Locks nothing."""
    seen = tables.relay.c.seen_at
    return connection.execute(sa.select(sa.func.count()).where(seen > later(sa.literal(-SILENT_AFTER_S, sa.Float)))).scalar_one()


def _seen(row: sa.Row[tuple[object, ...]]) -> Seen:
    ago_s = max(0.0, round((row.clock - row.seen_at).total_seconds(), 3))
    return Seen(
        owner=row.owner,
        version=row.version,
        broker=row.broker,
        running_s=max(0.0, round((row.clock - row.started_at).total_seconds(), 3)),
        seen_ago_s=ago_s,
        silent=ago_s > SILENT_AFTER_S,
    )
