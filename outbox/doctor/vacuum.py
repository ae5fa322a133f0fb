"""Checks of what keeps PostgreSQL from clearing away dead rows: an outbox makes more of them than other tables do."""

from __future__ import annotations

from typing import TYPE_CHECKING

from outbox.doctor.findings import problem, span, warning
from outbox.doctor.server import seeing
from outbox.store import server

if TYPE_CHECKING:
    from collections.abc import Iterator

    from outbox.doctor.findings import Finding
    from outbox.doctor.scope import Database

LONG_S = 300.0
VERY_LONG_S = 3600.0
RETAINED_BYTES = 1024**3
DEAD_ROWS = 1_000_000
_HELD = "vacuum keeps every row deleted since then, in every table of the database: each claim and clean-up gets slower"


def transactions(database: Database) -> Iterator[Finding]:
    """No session holds a snapshot for long."""
    for each in server.long_transactions(database.connection, longer_than_s=LONG_S):
        finding = problem if each["age_s"] > VERY_LONG_S else warning
        who = f"pid {each['pid']}, role {each['usename']}, application {each['application_name'] or 'without a name'}"
        yield finding(
            f"a transaction is open for {span(each['age_s'])}: {who}, {each['state']}",
            _HELD,
            f"let it end, or SELECT pg_terminate_backend({each['pid']}); ALTER ROLE {each['usename']} SET "
            "idle_in_transaction_session_timeout = '1min'",
        )
    yield from seeing(database)


def prepared_transactions(database: Database) -> Iterator[Finding]:
    """No prepared transaction was forgotten."""
    for each in server.prepared_transactions(database.connection, longer_than_s=LONG_S):
        yield problem(
            f"transaction {each['gid']!r} of {each['owner']} was prepared {span(each['age_s'])} ago, and never ended",
            f"it keeps its locks, and {_HELD}",
            f"COMMIT PREPARED '{each['gid']}' or ROLLBACK PREPARED '{each['gid']}'",
        )


def replication_slots(database: Database) -> Iterator[Finding]:
    """Every replication slot has somebody who reads it, and keeps up."""
    for each in server.replication_slots(database.connection):
        retained = each["retained"] or 0
        lost = each["wal_status"] in ("unreserved", "lost")
        if each["active"] and retained < RETAINED_BYTES and not lost:
            continue
        state = f"{'in use' if each['active'] else 'not in use'}, and retains {retained / 1024**2:,.0f} MiB of WAL"
        finding = problem if lost or retained >= RETAINED_BYTES else warning
        yield finding(
            f"replication slot {each['slot_name']} is {state} ({each['wal_status']})",
            "the server keeps WAL for it until its disk is full" + (f"; {_HELD}" if each["holds"] else ""),
            f"start what reads it, or SELECT pg_drop_replication_slot('{each['slot_name']}'); bound it with max_slot_wal_keep_size",
        )


def autovacuum(database: Database) -> Iterator[Finding]:
    """Autovacuum is on, for the server and for our tables."""
    for name, value in server.settings(database.connection, ["autovacuum", "track_counts"]).items():
        if value == "off":
            yield problem(
                f"{name} is off",
                "nothing clears away the dead rows of messages that were sent",
                f"ALTER SYSTEM RESET {name}; SELECT pg_reload_conf()",
            )
    for table in database.tables:
        health = server.table_health(database.connection, database.tables).get(table.name)
        if health is not None and health["unvacuumed"]:
            yield problem(
                f"autovacuum is off for {table.name}",
                "nothing clears away its dead rows",
                f"ALTER TABLE {database.quoted(table)} RESET (autovacuum_enabled)",
            )


def dead_rows(database: Database) -> Iterator[Finding]:
    """The tables are not mostly dead rows."""
    for table in database.tables:
        health = server.table_health(database.connection, database.tables).get(table.name)
        if health is not None and health["dead"] > DEAD_ROWS and health["dead"] > health["live"]:
            yield warning(
                f"{table.name} has {health['dead']:,} dead rows and {health['live']:,} live ones, in {health['bytes'] / 1024**2:,.0f} MiB",
                "claims and clean-ups read past them",
                f"look for what holds back vacuum, see the checks before; then VACUUM (ANALYZE) {database.quoted(table)}, and "
                f"ALTER TABLE {database.quoted(table)} SET (autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 50000)",
            )
