"""A whole system for `outbox-relay doctor`: database, relay, broker and a consumer's queue, in which tests plant faults."""

import base64
import json
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote, urlsplit

import kombu
import sqlalchemy as sa
from click.testing import CliRunner
from sqlalchemy.orm import sessionmaker

from outbox import Inbox, __version__
from outbox.broker.topology import QUORUM_QUEUE
from outbox.cli import main
from outbox.inbox.topology import declare
from outbox.store import registry
from outbox.store.registry import Broker
from outbox.tables import DEFAULT
from tests.rows import insert

QUEUE = "shipping"


@dataclass
class System:
    """One that is well: a relay has just said so in the database, and a consumer's queue is bound for every topic."""

    database_url: str
    broker_url: str
    management_url: str
    engine: sa.Engine
    folder: Path
    later: ExitStack
    options: dict[str, str] = field(init=False)

    def __post_init__(self) -> None:
        self.options = {
            "--database-url": self.database_url,
            "--broker-url": self.broker_url,
            "--management-url": self.management_url,
            "--inbox-retention": "30d",
        }

    def sql(self, *statements: str) -> None:
        """Run statements, each in a transaction of its own."""
        if self.engine.dialect.name == "sqlite":
            with self.engine.begin() as connection:
                for statement in statements:
                    connection.exec_driver_sql(statement)
            return
        for statement in statements:
            with self.engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
                connection.exec_driver_sql(statement.replace("DATABASE here", f"DATABASE {self.engine.url.database}"))

    def messages(self, *keys: str | None, **values: Any) -> None:
        insert(self.engine, *keys, **values)

    def failed(self, state: str, **values: Any) -> None:
        """A message that the consumer has failed with."""
        usual = {"consumer": "shipping", "message_id": "m-1", "topic": "orders.placed", "payload": b"{}", "state": state}
        with self.engine.begin() as connection:
            connection.execute(DEFAULT.failed.insert().values(usual | values))

    def relay(self, owner: str, *, version: str = __version__, broker: Broker = Broker.CONNECTED) -> None:
        with self.engine.begin() as connection:
            registry.note(connection, DEFAULT, owner=owner, version=version, broker=broker)

    def open_transaction(self) -> None:
        """A session that has a snapshot, and keeps it."""
        connection = self.later.enter_context(self.engine.connect().execution_options(isolation_level="REPEATABLE READ"))
        connection.exec_driver_sql("SELECT count(*) FROM outbox_message")

    @contextmanager
    def channel(self) -> Iterator[Any]:
        with kombu.Connection(self.broker_url) as connection, connection.channel() as channel:
            yield channel

    def queue(
        self,
        name: str = "archive",
        *,
        bound_to: str = "orders.#",
        instead: bool = False,
        like: dict[str, Any] = QUORUM_QUEUE,
        **how: Any,
    ) -> None:
        """One more queue, or this one instead of the consumer's, with arguments that are written `x_message_ttl`."""
        arguments = {name.replace("_", "-"): value for name, value in how.items() if name.startswith("x_")}
        options = {name: value for name, value in how.items() if not name.startswith("x_")}
        with self.channel() as channel:
            if instead:
                channel.queue_delete(QUEUE)
            channel.queue_declare(name, **{"durable": True, "auto_delete": False} | options, arguments=like | arguments)
            channel.queue_bind(name, "outbox", bound_to)

    def policy(self, **definition: Any) -> None:
        """A policy for every queue."""
        body = {
            "pattern": ".*",
            "apply-to": "queues",
            "definition": {name.replace("_", "-"): value for name, value in definition.items()},
        }
        self._put(f"policies/{self._vhost}/doctor", body)

    def config(self, text: str) -> None:
        """Read a TOML file too."""
        path = self.folder / "relay.toml"
        path.write_text(text)
        self.options["--config"] = str(path)

    def doctor(self, *more: str, code: int | None = None) -> dict[str, Any]:
        """Run it; return what it prints as JSON, with the findings of each check."""
        arguments = [word for pair in self.options.items() for word in pair]
        result = CliRunner().invoke(main, ["doctor", "--json", *arguments, *more], catch_exceptions=False)
        assert code is None or result.exit_code == code, result.output
        found: dict[str, Any] = json.loads(result.stdout)
        return found

    def close(self) -> None:
        self.later.close()
        self.engine.dispose()

    @property
    def _vhost(self) -> str:
        return quote(unquote(urlsplit(self.broker_url).path.removeprefix("/")), safe="")

    def _put(self, path: str, body: dict[str, Any]) -> None:
        where = urlsplit(self.management_url)
        authorization = "Basic " + base64.b64encode(f"{where.username}:{where.password}".encode()).decode()
        headers = {"Authorization": authorization, "Content-Type": "application/json"}
        target = f"http://{where.hostname}:{where.port}/api/{path}"
        request = urllib.request.Request(target, method="PUT", headers=headers, data=json.dumps(body).encode())
        with urllib.request.urlopen(request, timeout=30):
            pass


def of_level(report: dict[str, Any], *levels: str) -> dict[str, list[dict[str, str]]]:
    """The findings of these levels by the check that has made them."""
    found = {
        check["name"]: [finding for finding in check["findings"] if finding["level"] in levels] for check in report["checks"]
    }
    return {name: findings for name, findings in found.items() if findings}


def declare_consumer(broker_url: str) -> None:
    """Declare the queue of a consumer of everything, as one that ran before has."""
    inbox = Inbox(QUEUE, sessions=sessionmaker())
    inbox.transactional("#")(lambda _session, _message: None)
    with kombu.Connection(broker_url) as connection, connection.channel() as channel:
        declare(connection, channel, inbox)
