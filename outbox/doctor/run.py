"""Runs the checks, each for itself: one that fails is a finding, and one that hangs ends what would hang with it."""

from __future__ import annotations

import time
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import kombu
from sqlalchemy.exc import DBAPIError

from outbox.broker.dial import Dialler, is_amqp
from outbox.broker.errors import LOST, REFUSED, describe
from outbox.doctor.bounded import NoAnswer, bounded
from outbox.doctor.checks import BROKER, DATABASE, MANAGEMENT
from outbox.doctor.findings import Checked, Finding, Report, problem, skipped, warning
from outbox.doctor.management import Management
from outbox.doctor.scope import Broker, Database
from outbox.errors import BrokerUnavailable
from outbox.rqjob import SCHEME
from outbox.store import symptoms
from outbox.store.dialects import limit_statements
from outbox.store.engine import open_engine
from outbox.tables import Tables

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import sqlalchemy as sa

    from outbox.doctor.scope import BrokerCheck, DatabaseCheck, Scope

LIMIT_S = 6.0
"""How long one check may take; the server is told a little less."""

IN_ALL_S = 45.0
"""How long the checks of the database may take together, and so those of the broker."""

_NO_TABLE, _NO_RIGHT = "42P01", "42501"


def examine(scope: Scope) -> Report:
    """Run every check. Changes nothing, at either server, and ends in time whatever they do.

    Raises `ConfigurationError` for a URL that cannot work, before anything was looked at; nothing else.
    """
    engine, tables = open_engine(scope.database_url, application_name="outbox-doctor", pool_size=1), Tables(schema=scope.schema)
    management = _management(scope)
    database = _Lane(partial(_not_here, engine, scope), partial(_in_database, engine, tables, scope))
    found = database.walk(DATABASE)
    topics: list[tuple[str, str]] = []
    if database.closed is None:
        with suppress(Exception):  # the checks have said what is wrong
            topics = bounded(lambda: _in_transaction(engine, lambda connection: symptoms.topics(connection, tables)), LIMIT_S)
        engine.dispose()  # not after a hang: it would wait too
    broker = Broker(scope.broker_url or "", management, tuple(topics), scope)
    asked = _Lane(partial(_not_asked, broker), partial(_at_broker, broker)).walk(BROKER)
    over_http = _Lane(partial(_not_asked, broker), lambda check: list(check.run(broker))).walk(MANAGEMENT)
    return Report((*found, *asked, *over_http))


class _Away(Exception):
    """The server is not there: no further check can find anything."""


class _Lane:
    """The checks of one server, one after another; when it is away, or time is over, the rest are only named.

    `excuse` says why a check does not apply, if it does not; `run` makes it. `closed` is why nothing more could be asked.
    """

    def __init__(self, excuse: Callable[[Any], str | None], run: Callable[[Any], list[Finding]]) -> None:
        self._excuse = excuse
        self._run = run
        self.closed: str | None = None

    def walk(self, checks: Sequence[Any]) -> list[Checked]:
        """Run them."""
        ends_at = time.monotonic() + IN_ALL_S
        return [Checked(check.name, tuple(self._findings(check, ends_at))) for check in checks]

    def _findings(self, check: Any, ends_at: float) -> list[Finding]:
        left_s = ends_at - time.monotonic()
        if (reason := self._excuse(check) or self.closed or (None if left_s > 0 else "no time was left")) is not None:
            return [skipped(reason)]
        try:
            return bounded(partial(self._run, check), min(LIMIT_S, left_s))
        except NoAnswer:
            self.closed = f"the check {check.name} had no answer"
            return [_silent(check.name)]
        except _Away as error:
            self.closed = f"see the check {check.name}"
            return [_unreachable(str(error))]
        except Exception as error:  # noqa: BLE001 - whatever keeps a check from being made is what it has found
            return [_unmade(error)]


def _silent(name: str) -> Finding:
    return problem(
        f"no answer in {LIMIT_S:g} s",
        "the server hangs, is overloaded, or the network loses packets: whoever works with it waits",
        f"look at the server; run the check {name} alone once it answers",
    )


def _unreachable(error: str) -> Finding:
    return problem(
        error,
        "nothing is enqueued, claimed, published or handled there",
        "mend the URL, its user and password, start the server, or open the network",
    )


def _unmade(error: Exception) -> Finding:
    if isinstance(error, DBAPIError):
        cause = str(error.orig).strip().partition("\n")[0]
        if getattr(error.orig, "sqlstate", None) == _NO_TABLE or cause.startswith("no such table"):
            return skipped("a table is missing, see the check schema")
        right = getattr(error.orig, "sqlstate", None) == _NO_RIGHT
        remedy = (
            "outbox-relay schema grants: run doctor as the operator, or as the relay"
            if right
            else "try again; read the server's log"
        )
        return warning(f"could not be checked: {cause}", "whether this is well is not known", remedy)
    return warning(
        f"could not be checked: {str(error).partition(chr(10))[0] or type(error).__name__}",
        "whether this is well is not known",
        "mend what the message says, or --skip this check",
    )


# The database


def _not_here(engine: sa.Engine, scope: Scope, check: DatabaseCheck) -> str | None:
    if check.name in scope.skip:
        return "--skip"
    return None if check.everywhere or engine.dialect.name == "postgresql" else "only PostgreSQL"


def _in_database(engine: sa.Engine, tables: Tables, scope: Scope, check: DatabaseCheck) -> list[Finding]:
    file = engine.url.database if engine.dialect.name == "sqlite" else None
    if file and not Path(file).exists():  # SQLite would make it
        raise _Away(f"the database: there is no file {file}")
    try:
        found: list[Finding] = _in_transaction(engine, lambda connection: list(check.run(Database(connection, tables, scope))))
        return found
    except DBAPIError as error:
        if error.connection_invalidated or getattr(error.orig, "sqlstate", "") is None:
            raise _Away(f"the database: {str(error.orig).strip().partition(chr(10))[0]}") from error
        raise


def _in_transaction(engine: sa.Engine, work: Callable[[sa.Connection], Any]) -> Any:
    with engine.connect().execution_options(postgresql_readonly=True) as connection:
        limit_statements(connection, LIMIT_S - 1)
        return work(connection)


# The broker


def _management(scope: Scope) -> Management | None:
    if scope.management_url is None or not scope.broker_url or scope.broker_url.startswith(SCHEME):
        return None
    where: kombu.Connection = Dialler(scope.broker_url).connection()
    return Management.at(scope.management_url, vhost=where.virtual_host or "/", user=where.userid, password=where.password)


def _not_asked(broker: Broker, check: BrokerCheck) -> str | None:
    if check.name in broker.scope.skip:
        return "--skip"
    if not broker.url:
        return "no --broker-url was given"
    if check.amqp and (broker.url.startswith(SCHEME) or not is_amqp(Dialler(broker.url).connection())):
        return "only RabbitMQ"
    return "AMQP does not tell; give --management-url" if check.management and broker.management is None else None


def _at_broker(broker: Broker, check: BrokerCheck) -> list[Finding]:
    try:
        return list(check.run(broker))
    except REFUSED as error:
        raise _Away(f"the broker refuses us: {describe(error)}") from error
    except (BrokerUnavailable, *LOST) as error:
        raise _Away(str(error) if isinstance(error, BrokerUnavailable) else describe(error)) from error
    except Exception as error:
        if check is BROKER[0]:  # each virtual transport has errors of its own
            raise _Away(describe(error)) from error
        raise
