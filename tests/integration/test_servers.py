"""The servers that the other tests stand on do what those tests take for granted."""

import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import pytest
from amqp import NotFound
from kombu import Connection
from sqlalchemy import Connection as SqlConnection
from sqlalchemy import NullPool, create_engine, inspect, make_url, text
from sqlalchemy.exc import DBAPIError, OperationalError

from tests.servers import postgres, rabbitmq
from tests.servers import redis as redis_module
from tests.servers.postgres import Databases, Postgres
from tests.servers.rabbitmq import RabbitMQ, VirtualHosts
from tests.servers.redis import Keyspaces, Redis

GIVEN = {postgres.URL_VARIABLE, rabbitmq.URL_VARIABLE, redis_module.URL_VARIABLE} & os.environ.keys()


def execute(url: str, *statements: str) -> None:
    with create_engine(url, poolclass=NullPool).begin() as connection:
        for statement in statements:
            connection.execute(text(statement))


def connected(url: str) -> SqlConnection:
    return create_engine(url, poolclass=NullPool).connect()


def tables(url: str) -> list[str]:
    return inspect(create_engine(url, poolclass=NullPool)).get_table_names()


def put(url: str, body: str) -> None:
    # Confirmed, so that the broker has it on disk before a test kills it.
    confirmed = Connection(url, transport_options={"confirm_publish": True})
    with confirmed as connection, connection.SimpleQueue("kept") as queue:
        queue.put(body, delivery_mode=2)


def take(url: str) -> str:
    with Connection(url) as connection, connection.SimpleQueue("kept") as queue:
        message = queue.get(timeout=10)
        message.ack()
        return str(message.payload)


def queue_exists(url: str, name: str) -> bool:
    with Connection(url) as connection, connection.channel() as channel:
        try:
            channel.queue_declare(name, passive=True)
        except NotFound:
            return False
        return True


def test_databases_are_isolated(postgres: Databases, database_url: str) -> None:
    execute(database_url, "CREATE TABLE mine (id int)")
    other = postgres.create_database()
    assert tables(other) == []
    postgres.drop_database(other)
    assert tables(database_url) == ["mine"]


def test_a_wrong_password_is_refused(database_url: str) -> None:
    url = make_url(database_url).set(password="wrong")
    with pytest.raises(OperationalError, match="password authentication failed"):
        connected(url.render_as_string(hide_password=False))


@pytest.mark.parametrize("mode", ["fast", "immediate"])
def test_postgres_keeps_data_across_a_restart(own_postgres: Postgres, mode: Literal["fast", "immediate"]) -> None:
    url = own_postgres.create_database()
    execute(url, "CREATE TABLE kept (id int)")
    own_postgres.stop(mode=mode)
    with pytest.raises(OperationalError):
        tables(url)
    own_postgres.start()
    assert tables(url) == ["kept"]


def test_terminate_backends_cuts_the_clients_of_one_database(own_postgres: Postgres) -> None:
    mine, other = own_postgres.create_database(), own_postgres.create_database()
    with connected(mine) as victim, connected(other) as bystander:
        assert own_postgres.terminate_backends(mine) == 1
        with pytest.raises(DBAPIError):
            victim.execute(text("SELECT 1"))
        bystander.execute(text("SELECT 1"))


def test_virtual_hosts_are_isolated(rabbitmq: VirtualHosts, vhost_url: str) -> None:
    other = rabbitmq.create_vhost()
    if other == vhost_url:
        pytest.skip("the given broker has no management URL, so there is one virtual host only")
    put(vhost_url, "mine")
    assert queue_exists(vhost_url, "kept")
    assert not queue_exists(other, "kept")
    rabbitmq.drop_vhost(other)
    assert take(vhost_url) == "mine"


@pytest.mark.parametrize("ending", [RabbitMQ.stop, RabbitMQ.kill])
def test_rabbitmq_keeps_data_across_a_restart(own_rabbitmq: RabbitMQ, ending: Callable[[RabbitMQ], None]) -> None:
    url = own_rabbitmq.create_vhost()
    put(url, "kept")
    ending(own_rabbitmq)
    assert not listens(own_rabbitmq.port)
    own_rabbitmq.start()
    assert take(url) == "kept"
    own_rabbitmq.drop_vhost(url)


def test_rabbitmqctl_reaches_the_private_node(own_rabbitmq: RabbitMQ) -> None:
    assert "outbox@localhost" in own_rabbitmq.ctl("eval", "node().")
    with pytest.raises(RuntimeError, match="no_such_command"):
        own_rabbitmq.ctl("no_such_command")


def test_keyspaces_are_isolated(redis: Keyspaces, redis_url: str) -> None:
    other = redis.create_keyspace()
    if other == redis_url:
        pytest.skip("of a given Redis there is one database only")
    put(redis_url, "mine")
    with Connection(other) as connection:
        assert connection.default_channel._size("kept") == 0
    redis.drop_keyspace(other)
    assert take(redis_url) == "mine"


@pytest.mark.parametrize("ending", [Redis.stop, Redis.kill])
def test_redis_keeps_data_across_a_restart(own_redis: Redis, ending: Callable[[Redis], None]) -> None:
    url = own_redis.create_keyspace()
    put(url, "kept")
    ending(own_redis)
    assert not listens(own_redis.port)
    own_redis.start()
    assert take(url) == "kept"


@pytest.mark.skipif(bool(GIVEN), reason="running servers are given, so there may be none to start here")
@pytest.mark.parametrize("server", ["postgres.Postgres", "rabbitmq.RabbitMQ", "redis.Redis"])
def test_a_server_ends_with_the_process_that_started_it(server: str) -> None:
    module, name = server.split(".")
    code = f"""if True:
        import time
        from tests.servers.{module} import {name}
        with {name}() as server:
            print(server.folder, server.port, flush=True)
            time.sleep(600)
    """
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as starter:
        assert starter.stdout is not None
        folder, port = starter.stdout.readline().split()
        starter.kill()
    wait_until(lambda: not Path(folder).exists())
    wait_until(lambda: not listens(int(port)))


def listens(port: int) -> bool:
    with socket.socket() as client:
        return client.connect_ex(("127.0.0.1", port)) == 0


def wait_until(condition: Callable[[], bool], seconds: float = 20) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)
