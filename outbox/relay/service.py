"""Puts a relay together from its settings, and runs it."""

from __future__ import annotations

import logging
import math
from typing import TYPE_CHECKING

from sqlalchemy.exc import DBAPIError

from outbox import urls
from outbox.migrations import LATEST
from outbox.migrations.verify import require
from outbox.observe.logs import logged
from outbox.publishers.factory import open_publisher
from outbox.relay.cleanup import Cleanup
from outbox.relay.loop import Relay
from outbox.relay.presence import Presence
from outbox.relay.registry import Registry
from outbox.relay.stopping import Stopping
from outbox.relay.transactions import Transactions
from outbox.relay.wakeups import source_of, waking
from outbox.store.engine import open_engine, unavailable
from outbox.tables import Tables
from outbox.tracing.server import server_of

if TYPE_CHECKING:
    import threading

    import sqlalchemy as sa

    from outbox.publishers.base import Publisher
    from outbox.settings import RelaySettings
    from outbox.telemetry import Telemetry
    from outbox.vitals import Vitals

log = logging.getLogger("outbox.relay")


def run_relay(
    settings: RelaySettings, stop: threading.Event, *, vitals: Vitals | None = None, telemetry: Telemetry | None = None
) -> None:
    """Run a relay until `stop` is set; `vitals` is where it notes how it is, `telemetry` what it tells (default: it is logged).

    Raises `ConfigurationError`, `DatabaseUnavailable` or `SchemaError` before anything was claimed, and `BrokerRefused`
    if the broker says no at the first connect. A broker that is merely away is waited for, so that an application whose
    sidecar this is can start without it.
    """
    tables = Tables(schema=settings.schema)
    publisher = _publisher(settings)
    # It goes through outages anyway, so it need not ask first, before each transaction, whether a connection still works.
    engine = open_engine(settings.database_url, pre_ping=False)
    try:
        _check_tables(engine, tables)
        _run(engine, tables, publisher, settings, stop, vitals=vitals, telemetry=telemetry or logged())
    finally:
        engine.dispose()


def check(settings: RelaySettings) -> None:
    """Raise the `ConfigurationError` that keeps a relay with these settings from starting, without connecting to anything."""
    open_engine(settings.database_url).dispose()
    _publisher(settings).close()
    source_of(settings)


def _publisher(settings: RelaySettings) -> Publisher:
    return open_publisher(
        settings.broker_url,
        settings.routes,
        allow_unconfirmed=settings.allow_unconfirmed,
        confirm_timeout_s=settings.confirm_timeout_s,
    )


def _check_tables(engine: sa.Engine, tables: Tables) -> None:
    try:
        with engine.connect() as connection:
            version = require(connection, tables)
    except DBAPIError as error:
        raise unavailable(error) from error
    if version > LATEST:
        log.warning(
            "the tables are newer than this relay, which leaves newer messages alone", extra={"version": version, "known": LATEST}
        )


def _run(
    engine: sa.Engine,
    tables: Tables,
    publisher: Publisher,
    settings: RelaySettings,
    stop: threading.Event,
    *,
    vitals: Vitals | None,
    telemetry: Telemetry,
) -> None:
    alone = open_engine(settings.database_url, application_name="outbox-relay-presence", pool_size=1)
    presence = Presence(alone, tables, owner=settings.owner)
    transactions = Transactions(
        engine,
        tables,
        owner=settings.owner,
        lease_s=settings.lease_s,
        batch_size=settings.batch_size,
        policies=settings.policies,
        keep_sent=settings.retention_s is not None,
        presence=presence,
    )
    cleanup = Cleanup(
        engine, tables, retention_s=settings.retention_s, inbox_retention_s=settings.inbox_retention_s, telemetry=telemetry
    )
    registry = Registry(engine, tables, owner=settings.owner)
    with waking(settings, stop) as wake_ups:
        relay = Relay(
            transactions,
            publisher,
            Stopping(stop, grace_s=settings.grace_s, wake_ups=wake_ups),
            lease_s=settings.lease_s,
            poll_interval_s=settings.poll_interval_s,
            cleanup=cleanup,
            registry=registry,
            vitals=vitals,
            presence=presence,
            # The more a claim reads, the longer a broker would wait for it. On SQLite it would only wait for the settle of the last.
            ahead_from=settings.batch_size / 2 if engine.dialect.name == "postgresql" else math.inf,
            server=server_of(urls.current(settings.broker_url)),
            telemetry=telemetry,
        )
        log.info("relay started", extra={"relay": settings.owner})
        try:
            relay.run()
        finally:
            presence.close()
            registry.leave()
    log.info("relay stopped", extra={"relay": settings.owner})
