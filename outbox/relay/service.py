"""Puts a relay together from its settings, and runs it."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from sqlalchemy.exc import DBAPIError

from outbox.migrations.verify import require
from outbox.publishers.factory import open_publisher
from outbox.relay.loop import Relay
from outbox.relay.stopping import Stopping
from outbox.relay.transactions import Transactions
from outbox.store.engine import open_engine, unavailable
from outbox.tables import Tables

if TYPE_CHECKING:
    import threading

    from outbox.settings import RelaySettings

log = logging.getLogger("outbox.relay")


def run_relay(settings: RelaySettings, stop: threading.Event) -> None:
    """Run a relay until `stop` is set.

    Raises `ConfigurationError`, `DatabaseUnavailable` or `SchemaError` before anything was claimed, and `BrokerRefused`
    if the broker says no at the first connect. A broker that is merely away is waited for, so that an application whose
    sidecar this is can start without it.
    """
    tables = Tables(schema=settings.schema)
    publisher = open_publisher(
        settings.broker_url,
        settings.routes,
        allow_unconfirmed=settings.allow_unconfirmed,
        confirm_timeout_s=settings.confirm_timeout_s,
    )
    engine = open_engine(settings.database_url)
    try:
        with engine.connect() as connection:
            require(connection, tables)
    except DBAPIError as error:
        raise unavailable(error) from error
    transactions = Transactions(
        engine,
        tables,
        owner=settings.owner,
        lease_s=settings.lease_s,
        batch_size=settings.batch_size,
        policy=settings.policy,
    )
    stopping = Stopping(stop, grace_s=settings.grace_s)
    relay = Relay(transactions, publisher, stopping, lease_s=settings.lease_s, poll_interval_s=settings.poll_interval_s)
    log.info("relay started", extra={"relay": settings.owner})
    try:
        relay.run()
    finally:
        engine.dispose()
    log.info("relay stopped", extra={"relay": settings.owner})
