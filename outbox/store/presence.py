"""The presence of relays: a lock that each holds, on a session of its own, for as long as its process lives (PostgreSQL).

The number of a lock is drawn anew for every session and stands in the names that leases are written under. So a lock that
somebody else can get was held by a session that has ended, and it will not be held again: that the owner is gone is for ever.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import sqlalchemy as sa

from outbox.sqltypes import now

if TYPE_CHECKING:
    from collections.abc import Iterable

    from outbox.tables import Tables

_MARK = "@"


def named(owner: str, number: int) -> str:
    """Return the name under which a relay that holds this lock writes its leases."""
    return f"{owner}{_MARK}{number:016x}"


def _number_of(name: str) -> int | None:
    number = name.rpartition(_MARK)[2]
    try:
        return int(number, 16) if _MARK in name and len(number) == 16 else None
    except ValueError:
        return None


def is_own_session(connection: sa.Connection) -> bool:
    """Tell whether the session is ours from end to end: a pooler would end it before us, or keep it after us.

    A pooler makes up the process id that it tells its clients at the start; the server's own answer passes through it.
    """
    driver: Any = connection.connection.driver_connection
    told = getattr(getattr(driver, "info", None), "backend_pid", None)
    return told is not None and told == connection.execute(sa.select(sa.func.pg_backend_pid())).scalar_one()


def hold(connection: sa.Connection, number: int) -> bool:
    """Hold the lock until the session ends, which no idleness shall end; return false if somebody has that number."""
    setting = sa.table("pg_settings", sa.column("name"))
    lasting = sa.select(sa.func.set_config(setting.c.name, "0", sa.false())).where(setting.c.name == "idle_session_timeout")
    connection.execute(lasting)
    taken: bool = connection.execute(sa.select(sa.func.pg_try_advisory_lock(sa.literal(number, sa.BigInteger)))).scalar_one()
    return taken


def gone(connection: sa.Connection, tables: Tables, *, but: str) -> set[str]:
    """Return those who have a lease that runs, and a lock that they no longer hold; `but` is one's own name.

    Reads the 64 rows of `outbox_partition`. Each lock is tried, as shared, so that two who try do not take each other for the
    owner, and for this transaction only.
    """
    partition = tables.partition
    running = sa.select(partition.c.lease_owner).where(partition.c.lease_until >= now(), partition.c.lease_owner != but)
    names = connection.execute(running.distinct()).scalars().all()
    return {name for name in _known(names) if _is_free(connection, name)}


def _known(names: Iterable[str]) -> list[str]:
    return sorted(name for name in names if _number_of(name) is not None)


def _is_free(connection: sa.Connection, name: str) -> bool:
    number = sa.literal(_number_of(name), sa.BigInteger)
    free: bool = connection.execute(sa.select(sa.func.pg_try_advisory_xact_lock_shared(number))).scalar_one()
    return free
