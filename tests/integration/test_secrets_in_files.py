"""Passwords that are in files and change while processes run; and PostgreSQL through its own socket."""

import secrets
import threading
from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest
import sqlalchemy as sa
from click.testing import CliRunner
from sqlalchemy.exc import OperationalError

import outbox
from outbox import urls
from outbox.cli import main
from outbox.errors import BrokerRefused, BrokerUnavailable
from outbox.publishers.factory import open_publisher
from outbox.relay.service import run_relay
from outbox.routes import Route, Routes
from outbox.settings import RelaySettings
from outbox.store.engine import open_engine
from outbox.store.listen import Server
from tests.integration.consuming import WAIT_S, Shop, record, running, until
from tests.integration.test_rabbitmq_publisher import declare, ids_in
from tests.integration.test_relay import left, prepared
from tests.servers.postgres import Postgres
from tests.servers.rabbitmq import RabbitMQ

ROUTES = Routes((Route("#", exchange="", declare=False),))


class Account:
    """A user of both servers, and the files with its URLs."""

    def __init__(self, rabbitmq: RabbitMQ, database_url: str, vhost: str, folder: Path) -> None:
        self.rabbitmq = rabbitmq
        self.name = f"app_{secrets.token_hex(4)}"
        self._urls = (sa.make_url(database_url), vhost)
        self.database_file, self.broker_file = folder / "database-url", folder / "broker-url"
        self._administrator = sa.create_engine(database_url, poolclass=sa.NullPool)
        self._execute(f"CREATE ROLE {self.name} LOGIN SUPERUSER PASSWORD 'old'")
        self.rabbitmq.ctl("add_user", self.name, "old")
        name = vhost.rpartition("/")[2]
        self.rabbitmq.ctl("set_permissions", "-p", name, self.name, ".*", ".*", ".*")
        self.write("old")

    def _execute(self, statement: str) -> None:
        with self._administrator.begin() as connection:
            connection.execute(sa.text(statement))

    def write(self, password: str) -> None:
        database, vhost = self._urls
        url = database.set(username=self.name, password=password).render_as_string(hide_password=False)
        self.database_file.write_text(f"{url}\n")
        self.broker_file.write_text(vhost.replace("guest:guest", f"{self.name}:{password}") + "\n")
        for file in (self.database_file, self.broker_file):
            file.chmod(0o644)  # as Kubernetes mounts them

    def rotate(self) -> None:
        """Let the password be another one, and end all that the old one has opened."""
        self._execute(f"ALTER ROLE {self.name} PASSWORD 'new'")
        self.rabbitmq.ctl("change_password", self.name, "new")
        self.cut()

    def cut(self) -> None:
        self._execute(f"SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE usename = '{self.name}'")
        self.rabbitmq.ctl("close_all_connections", "--global", "maintenance")

    def drop(self) -> None:
        self.cut()
        self._execute(f"DROP ROLE {self.name}")
        self.rabbitmq.ctl("delete_user", self.name)


@pytest.fixture
def account(own_rabbitmq: RabbitMQ, database_url: str, tmp_path: Path) -> Iterator[Account]:
    vhost = own_rabbitmq.create_vhost()
    account = Account(own_rabbitmq, database_url, vhost, tmp_path)
    yield account
    account.drop()
    own_rabbitmq.drop_vhost(vhost)


def test_a_relay_and_a_consumer_go_on_with_a_new_password(account: Account, database_url: str) -> None:
    engine = prepared(database_url)
    vhost = account._urls[1]
    shop = Shop(database_url, vhost)
    shop.inbox.transactional("orders.*")(record)
    shop.declare()
    settings = RelaySettings(
        database_url=urls.of_file(account.database_file), broker_url=urls.of_file(account.broker_file), wake="postgres"
    )
    stop, ended = threading.Event(), list[BaseException | None]()

    def relay() -> None:
        try:
            run_relay(settings, stop)
            ended.append(None)
        except BaseException as error:
            ended.append(error)

    thread = threading.Thread(target=relay, daemon=True)
    thread.start()
    with running(shop.inbox, urls.of_file(account.broker_file)):
        place(engine)
        until(lambda: len(shop.effects()) == 1)
        account.rotate()
        place(engine)
        account.write("new")
        until(lambda: len(shop.effects()) == 2)
        account.database_file.unlink()
        account.broker_file.unlink()
        account.cut()
        place(engine)
        account.write("new")
        until(lambda: len(shop.effects()) == 3)
    stop.set()
    thread.join(WAIT_S)
    assert ended == [None]
    assert left(engine) == 0
    shop.close()


def place(engine: sa.Engine) -> None:
    with engine.begin() as connection:
        outbox.enqueue(connection, outbox.Event(topic="orders.placed", payload={}))


def test_a_file_that_cannot_be_read_any_more_is_an_outage(account: Account) -> None:
    url = urls.of_file(account.database_file)
    engine, server = open_engine(url), Server.at(url)
    publisher = open_publisher(urls.of_file(account.broker_file), ROUTES)
    account.database_file.unlink()
    account.broker_file.write_text("\n")
    with pytest.raises(OperationalError, match=r"the file with the URL cannot be read: .*database-url: No such file"):
        engine.connect()
    with pytest.raises(psycopg.OperationalError, match="the file with the URL cannot be read"):
        server.connect()
    with pytest.raises(BrokerUnavailable, match=r"the file with the URL is empty: .*broker-url") as caught:
        publisher.connect()
    assert not isinstance(caught.value, BrokerRefused)
    account.write("old")
    engine.connect().close()
    server.connect().close()
    publisher.connect()
    publisher.close()
    engine.dispose()


def test_a_password_file_serves_a_url_that_is_none_itself(account: Account, tmp_path: Path) -> None:
    password = tmp_path / "password"
    password.write_text("old\n")
    database, vhost = account._urls
    url = database._replace(username=account.name, password=None).update_query_dict({"password_file": str(password)})
    engine = open_engine(url.render_as_string())
    publisher = open_publisher(vhost.replace("guest:guest", account.name) + f"?password_file={password}", ROUTES)
    engine.connect().close()
    publisher.connect()
    publisher.close()
    account.rotate()
    engine.dispose()
    with pytest.raises(OperationalError, match="password authentication failed"):
        engine.connect()
    password.write_text("new")
    engine.connect().close()
    publisher.connect()
    publisher.close()
    engine.dispose()


def test_a_database_is_reached_through_its_own_socket(own_postgres: Postgres, vhost_url: str) -> None:
    there = sa.make_url(own_postgres.create_database())
    query = {"host": str(own_postgres.folder), "port": str(own_postgres.port)}
    url = there._replace(drivername="postgresql", host=None, port=None, query=query).render_as_string(hide_password=False)
    assert "@/" in url
    engine = prepared(url.replace("postgresql:", "postgresql+psycopg:"))
    declare(vhost_url, "q")
    with engine.begin() as connection:
        outbox.enqueue(connection, outbox.Event(topic="q", payload={}))
        assert connection.execute(sa.text("SELECT inet_server_addr()")).scalar_one() is None
    settings = RelaySettings(database_url=url, broker_url=vhost_url, routes=ROUTES, wake="postgres")
    stop = threading.Event()
    relay = threading.Thread(target=run_relay, args=(settings, stop), daemon=True)
    relay.start()
    until(lambda: left(engine) == 0)
    stop.set()
    relay.join(WAIT_S)
    assert not relay.is_alive()
    assert len(ids_in(vhost_url, "q")) == 1
    done = CliRunner().invoke(main, ["status", "--database-url", url])
    assert done.exit_code == 0, done.output
