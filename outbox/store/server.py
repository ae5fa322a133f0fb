"""What PostgreSQL says of itself: its settings, its sessions, and what keeps it from vacuuming. Reads only; locks nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING

import sqlalchemy as sa

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from outbox.tables import Tables


def settings(connection: sa.Connection, names: Iterable[str]) -> dict[str, str]:
    """Return settings as a new transaction of this session has them, those of them that this version knows; times in milliseconds.

    Not as they are now, which is how we have limited ourselves.
    """
    query = sa.text("SELECT name, reset_val FROM pg_settings WHERE name = ANY(:names)")
    return {row.name: row.reset_val for row in connection.execute(query, {"names": list(names)})}


def settings_of_others(connection: sa.Connection, name: str) -> list[tuple[str, str]]:
    """Return for which roles, or all roles of this database, a setting was set, and to what."""
    query = sa.text(
        "SELECT coalesce(r.rolname, 'every role') AS whose, each AS setting FROM pg_db_role_setting s"
        " CROSS JOIN LATERAL unnest(s.setconfig) AS each LEFT JOIN pg_roles r ON r.oid = s.setrole"
        " WHERE each LIKE :prefix AND s.setdatabase IN (0, (SELECT oid FROM pg_database WHERE datname = current_database()))"
        " ORDER BY 1, 2"
    )
    rows = connection.execute(query, {"prefix": f"{name}=%"}).all()
    return [(row.whose, row.setting.partition("=")[2]) for row in rows]


def is_standby(connection: sa.Connection) -> bool:
    """Tell whether the server is in recovery, so that nothing can be written there."""
    return bool(connection.execute(sa.select(sa.func.pg_is_in_recovery())).scalar_one())


def clock(connection: sa.Connection) -> float:
    """Return the server's clock at this moment, in seconds since 1970."""
    return float(connection.execute(sa.text("SELECT extract(epoch FROM clock_timestamp())")).scalar_one())


def ages(connection: sa.Connection) -> tuple[int, int]:
    """Return how many transactions, and multixacts, old the oldest row version of this database is that is not frozen."""
    query = "SELECT age(datfrozenxid) AS xids, mxid_age(datminmxid) AS multis FROM pg_database WHERE datname = current_database()"
    row = connection.execute(sa.text(query)).one()
    return row.xids, row.multis


def connections(connection: sa.Connection) -> list[tuple[str, int, int]]:
    """Return for the server, the database and the role how many connections there are and may be; without those without a limit."""
    query = sa.text(
        "SELECT 'the server' AS what, (SELECT count(*) FROM pg_stat_activity WHERE backend_type = 'client backend'"
        " OR backend_type IS NULL) AS open, current_setting('max_connections')::int"
        " - current_setting('superuser_reserved_connections')::int"
        " - coalesce(current_setting('reserved_connections', true)::int, 0) AS most"
        " UNION ALL SELECT 'the database ' || datname, (SELECT count(*) FROM pg_stat_activity a WHERE a.datid = d.oid), datconnlimit"
        " FROM pg_database d WHERE datname = current_database() AND datconnlimit >= 0"
        " UNION ALL SELECT 'the role ' || rolname, (SELECT count(*) FROM pg_stat_activity a WHERE a.usesysid = r.oid), rolconnlimit"
        " FROM pg_roles r WHERE rolname = current_user AND rolconnlimit >= 0"
    )
    return [(row.what, row.open, row.most) for row in connection.execute(query)]


def sees_everybody(connection: sa.Connection) -> bool:
    """Tell whether this role may see what the sessions of others do."""
    return bool(connection.execute(sa.text("SELECT pg_has_role('pg_read_all_stats', 'USAGE')")).scalar_one())


def long_transactions(connection: sa.Connection, *, longer_than_s: float) -> list[sa.RowMapping]:
    """Return the sessions of this database that have a snapshot or have written, in a transaction older than that, the oldest first."""
    query = sa.text(
        "SELECT pid, usename, application_name, state, extract(epoch FROM clock_timestamp() - xact_start)::float AS age_s"
        " FROM pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid()"
        " AND backend_type IN ('client backend', 'walsender') AND (backend_xmin IS NOT NULL OR backend_xid IS NOT NULL)"
        " AND xact_start < clock_timestamp() - make_interval(secs => :age_s) ORDER BY xact_start LIMIT 20"
    )
    return list(connection.execute(query, {"age_s": longer_than_s}).mappings())


def prepared_transactions(connection: sa.Connection, *, longer_than_s: float) -> list[sa.RowMapping]:
    """Return the transactions of this database that were prepared longer ago than that, and neither committed nor rolled back."""
    query = sa.text(
        "SELECT gid, owner, extract(epoch FROM clock_timestamp() - prepared)::float AS age_s FROM pg_prepared_xacts"
        " WHERE database = current_database() AND prepared < clock_timestamp() - make_interval(secs => :age_s) ORDER BY prepared"
    )
    return list(connection.execute(query, {"age_s": longer_than_s}).mappings())


def replication_slots(connection: sa.Connection) -> list[sa.RowMapping]:
    """Return the replication slots of the server, with the bytes of WAL that each retains, and whether it holds back vacuum."""
    query = sa.text(
        "SELECT slot_name, active, wal_status, xmin IS NOT NULL OR catalog_xmin IS NOT NULL AS holds, pg_wal_lsn_diff("
        "CASE WHEN pg_is_in_recovery() THEN pg_last_wal_receive_lsn() ELSE pg_current_wal_lsn() END, restart_lsn)::bigint AS retained"
        " FROM pg_replication_slots WHERE NOT temporary ORDER BY slot_name"
    )
    return list(connection.execute(query).mappings())


def table_health(connection: sa.Connection, tables: Tables) -> dict[str, sa.RowMapping]:
    """Return by the name of each table that is there its dead and live rows, its size, and whether autovacuum is off for it."""
    query = sa.text(
        "SELECT coalesce(s.n_dead_tup, 0) AS dead, coalesce(s.n_live_tup, 0) AS live, pg_total_relation_size(c.oid) AS bytes,"
        " EXISTS (SELECT FROM pg_options_to_table(c.reloptions) WHERE option_name = 'autovacuum_enabled'"
        " AND NOT option_value::boolean) AS unvacuumed"
        " FROM pg_class c LEFT JOIN pg_stat_all_tables s ON s.relid = c.oid WHERE c.oid = to_regclass(:name)"
    )
    quoted = connection.dialect.identifier_preparer.format_table
    found = {table.name: connection.execute(query, {"name": quoted(table)}).mappings().one_or_none() for table in tables}
    return {name: row for name, row in found.items() if row is not None}


def missing_rights(
    connection: sa.Connection, schema: str | None, rights: Mapping[str, Mapping[str, tuple[str, ...]]]
) -> list[str]:
    """Return those of some rights that this role does not have, in words: by table and privilege the columns, none for the whole."""
    missing: list[str] = []
    quote = connection.dialect.identifier_preparer.quote
    for name, privileges in rights.items():
        place = quote(name) if schema is None else f"{quote(schema)}.{quote(name)}"
        for privilege, columns in privileges.items():
            lacks = [column for column in columns or (None,) if not _has(connection, place, privilege, column)]
            if lacks:
                missing.append(f"{privilege}{_listed(lacks)} on {place}")
    return missing


def may_use(connection: sa.Connection, schema: str) -> bool:
    """Tell whether this role may look up names in a schema."""
    query = sa.text("SELECT has_schema_privilege(oid, 'USAGE') FROM pg_namespace WHERE nspname = :name")
    return bool(connection.execute(query, {"name": schema}).scalar_one_or_none() or False)


def role(connection: sa.Connection) -> str:
    """Return the name of the current role."""
    return str(connection.execute(sa.text("SELECT current_user")).scalar_one())


def _has(connection: sa.Connection, table: str, privilege: str, column: str | None) -> bool:
    if column is None:
        query = sa.text("SELECT has_table_privilege(to_regclass(:name), :privilege)")
    else:
        query = sa.text("SELECT has_column_privilege(to_regclass(:name), :column, :privilege)")
    asked = {"name": table, "privilege": privilege} | ({} if column is None else {"column": column})
    held: bool | None = connection.execute(query, asked).scalar_one()
    return held is not False  # None: there is no such table, which is for another check to say


def _listed(columns: list[str | None]) -> str:
    named = [column for column in columns if column is not None]
    return f" ({', '.join(named)})" if named else ""
