"""What a doctor is told, and what each check is given to look at."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from outbox.policies import Policies
from outbox.publishers.factory import transport_name
from outbox.routes import Routes
from outbox.rqjob import SCHEME
from outbox.wakeaddress import Postgres, parse

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    import sqlalchemy as sa

    from outbox.doctor.findings import Finding
    from outbox.doctor.management import Management
    from outbox.tables import Tables


@dataclass(frozen=True, slots=True, kw_only=True)
class Scope:
    """Where to look, and the settings of the relay as far as a check needs them; they mean what they do in `RelaySettings`.

    Without `broker_url` nothing is asked of a broker. `management_url` is that of RabbitMQ's management plugin,
    `http://user:password@host:15672`; without a user it is asked as the user of the broker URL. Raises `ConfigurationError`
    for a URL or an address that cannot be read.
    """

    database_url: str = field(repr=False)
    broker_url: str | None = field(default=None, repr=False)
    management_url: str | None = field(default=None, repr=False)
    schema: str | None = None
    routes: Routes = field(default_factory=Routes)
    policies: Policies = field(default_factory=Policies)
    lease_s: float = 30.0
    poll_interval_s: float = 0.5
    inbox_retention_s: float | None = None
    allow_unconfirmed: bool = False
    wake: str | None = None
    wake_database_url: str | None = field(default=None, repr=False)
    skip: frozenset[str] = frozenset()

    def __post_init__(self) -> None:
        if self.wake is not None:
            parse(self.wake)
        if self.broker_url is not None and not self.broker_url.startswith(SCHEME):
            transport_name(self.broker_url)

    @property
    def listens(self) -> bool:
        """Whether the relay hears wake-ups from the database."""
        return self.wake is not None and isinstance(parse(self.wake), Postgres)


@dataclass(frozen=True, slots=True)
class Database:
    """What a check of the database gets: a connection in a transaction that can only read, with a limit on each statement."""

    connection: sa.Connection
    tables: Tables
    scope: Scope

    @property
    def is_postgresql(self) -> bool:
        """Whether it is PostgreSQL, rather than SQLite."""
        return self.connection.dialect.name == "postgresql"

    def quoted(self, table: sa.Table) -> str:
        """Return the name of a table as SQL takes it."""
        return self.connection.dialect.identifier_preparer.format_table(table)


@dataclass(frozen=True, slots=True)
class Broker:
    """What a check of the broker gets; `topics` are those of the messages that were seen, each with a type. See `Scope`."""

    url: str = field(repr=False)
    management: Management | None
    topics: tuple[tuple[str, str], ...]
    scope: Scope


@dataclass(frozen=True, slots=True)
class DatabaseCheck:
    """A check under its name, which stays; `everywhere` if it also applies to SQLite."""

    name: str
    run: Callable[[Database], Iterable[Finding]]
    everywhere: bool = False


@dataclass(frozen=True, slots=True)
class BrokerCheck:
    """A check under its name, which stays; `amqp` if only such a broker can be asked, `management` if only by that."""

    name: str
    run: Callable[[Broker], Iterable[Finding]]
    amqp: bool = True
    management: bool = False
