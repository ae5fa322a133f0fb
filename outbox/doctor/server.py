"""Checks of the database server: which one it is, and how it is set up."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from outbox.doctor.findings import info, problem, warning
from outbox.store import server
from outbox.store.engine import open_engine
from outbox.store.presence import is_own_session

if TYPE_CHECKING:
    from collections.abc import Iterator

    from outbox.doctor.findings import Finding
    from outbox.doctor.scope import Database

# The oldest that the PostgreSQL project still mends at the end of 2026: https://www.postgresql.org/support/versioning/
OLDEST_VERSION = 15
CLOCK_S = 2.0
AGED = 1_000_000_000
"""Half of what ends in a database that takes no writes; autovacuum begins to work against it at a fifth of that."""

FULL, NEARLY_FULL = 0.95, 0.8
# Below these a limit of the server ends what takes as long in good order. Milliseconds, as PostgreSQL gives them.
_SHORTEST_MS = {
    "statement_timeout": (5_000, "operators' commands and consumers' statements end before they are done"),
    "transaction_timeout": (30_000, "a claim, a settle or a handler is cut off in the middle, and is tried again"),
    "idle_in_transaction_session_timeout": (
        10_000,
        "a handler that waits for anything else loses its transaction, and is tried again",
    ),
    "lock_timeout": (100, "statements that wait their turn for a moment fail"),
}


def reachable(database: Database) -> Iterator[Finding]:
    """The database answers, and is one that we know."""
    version: tuple[Any, ...] = database.connection.dialect.server_version_info or (0,)
    if database.is_postgresql and version[0] < OLDEST_VERSION:
        yield warning(
            f"PostgreSQL {'.'.join(map(str, version))} is older than {OLDEST_VERSION}",
            "it gets no corrections any more, and outbox is not tested on it",
            "update PostgreSQL",
        )


def writable(database: Database) -> Iterator[Finding]:
    """It is the primary, and takes writes."""
    if server.is_standby(database.connection):
        yield problem(
            "this server is a standby (in recovery)",
            "it takes no writes: nothing can be enqueued, claimed or settled there",
            "let the database URL lead to the primary (libpq: several hosts and target_session_attrs=read-write)",
        )
    elif server.settings(database.connection, ["default_transaction_read_only"]) == {"default_transaction_read_only": "on"}:
        yield problem(
            "default_transaction_read_only is on",
            "transactions can write nothing unless they ask for it: nothing is enqueued, claimed or settled",
            "ALTER ROLE ... or ALTER DATABASE ... RESET default_transaction_read_only",
        )


def durability(database: Database) -> Iterator[Finding]:
    """What is committed survives a crash."""
    names = ("fsync", "full_page_writes", "synchronous_commit")
    found = server.settings(database.connection, names)
    for name in names:
        if found.get(name) == "off":
            yield problem(
                f"{name} is off",
                "a crash of the server loses committed messages, or damages the tables",
                f"ALTER SYSTEM RESET {name}; SELECT pg_reload_conf(); or ALTER ROLE ... RESET {name}, wherever it was set",
            )
    for whose, value in server.settings_of_others(database.connection, "synchronous_commit"):
        if value == "off" and found.get("synchronous_commit") != "off":
            yield problem(
                f"synchronous_commit is off for {whose}",
                "a crash of the server loses what it has committed in the last moments, events too",
                f"ALTER ROLE {whose} RESET synchronous_commit",
            )


def timeouts(database: Database) -> Iterator[Finding]:
    """No limit of the server cuts off what takes its time in good order."""
    found = server.settings(database.connection, [*_SHORTEST_MS, "idle_session_timeout"])
    for name, (shortest, consequence) in _SHORTEST_MS.items():
        value = int(found.get(name, "0"))
        if 0 < value < shortest:
            yield warning(
                f"{name} is {value} ms for this role", consequence, f"ALTER ROLE ... SET {name} = '{shortest}ms', or more"
            )
    idle = int(found.get("idle_session_timeout", "0"))
    if idle and database.scope.listens:
        yield warning(
            f"idle_session_timeout is {idle} ms for this role",
            "the session that hears wake-ups ends whenever nothing has come for so long",
            "ALTER ROLE ... SET idle_session_timeout = 0",
        )


def isolation(database: Database) -> Iterator[Finding]:
    """Transactions are READ COMMITTED unless they ask for more."""
    value = server.settings(database.connection, ["default_transaction_isolation"])["default_transaction_isolation"]
    if value != "read committed":
        yield warning(
            f"default_transaction_isolation is {value}",
            "consumers' transactions fail with SQLSTATE 40001 where they would wait, and are tried again; the relay sets its own",
            "ALTER ROLE ... SET default_transaction_isolation = 'read committed', or isolation_level in the consumers' engines",
        )


def connections(database: Database) -> Iterator[Finding]:
    """There is room for more connections."""
    for what, number, most in server.connections(database.connection):
        if number < NEARLY_FULL * most:
            continue
        finding = problem if number >= FULL * most else warning
        yield finding(
            f"{what} has {number} of {most} connections",
            "further ones are refused: relays and consumers that restart, and applications",
            "SELECT usename, application_name, count(*) FROM pg_stat_activity GROUP BY 1, 2; raise the limit, or pool connections",
        )


def clock(database: Database) -> Iterator[Finding]:
    """This host's clock and the database's agree."""
    before = time.time()
    there = server.clock(database.connection)
    after = time.time()
    off_s = there - (before + after) / 2
    if abs(off_s) > CLOCK_S + (after - before) / 2:
        yield warning(
            f"the database's clock is {abs(off_s):.1f} s {'ahead of' if off_s > 0 else 'behind'} this host's",
            "messages with available_at are due by so much too late or too early, and logs disagree; leases and delays do not mind",
            "let both hosts synchronise their clocks (timedatectl)",
        )


def pooler(database: Database) -> Iterator[Finding]:
    """The session is ours from end to end."""
    if not is_own_session(database.connection):
        yield warning(
            "a pooler is between here and the database",
            "when a relay is killed its partitions move only when its lease is over; LISTEN does not pass it",
            "give the relay a direct --database-url (it needs three or four connections), or live with the lease",
        )


def wake(database: Database) -> Iterator[Finding]:
    """Wake-ups of the database reach the relay: LISTEN needs a session of its own."""
    scope = database.scope
    if not scope.listens:
        return
    engine = open_engine(scope.wake_database_url or scope.database_url, application_name="outbox-doctor", pool_size=1)
    try:
        with engine.connect() as connection:
            own = is_own_session(connection)
    finally:
        engine.dispose()
    if not own:
        yield problem(
            "--wake postgres leads through a pooler",
            "LISTEN does not pass it: the relay hears nothing, and looks at every poll interval only",
            "--wake-database-url with a direct URL, or --wake udp://",
        )


def age(database: Database) -> Iterator[Finding]:
    """Vacuum keeps up with the transaction ids."""
    for what, number in zip(("transactions", "multixacts"), server.ages(database.connection), strict=True):
        if number > AGED:
            yield problem(
                f"the oldest rows of this database are {number:,} {what} old",
                "at two thousand million PostgreSQL takes no more writes",
                "find what holds back vacuum (the checks transactions, prepared-transactions, replication-slots), then VACUUM FREEZE",
            )


def seeing(database: Database) -> Iterator[Finding]:
    """This role sees what others do. Not needed for anything but the check of transactions."""
    if not server.sees_everybody(database.connection):
        yield info(
            f"other roles' transactions cannot be seen; as a superuser: GRANT pg_monitor TO {server.role(database.connection)}"
        )
