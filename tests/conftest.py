"""Fixtures for real servers. They start when the first test asks for them and serve the whole session."""

import os
from collections.abc import Iterator

import pytest

from tests.servers import postgres as pg
from tests.servers import rabbitmq as mq
from tests.servers import redis as rd


@pytest.fixture(scope="session")
def postgres() -> Iterator[pg.Databases]:
    """A PostgreSQL that all tests share."""
    with pg.postgres_server() as server:
        yield server


@pytest.fixture(scope="session")
def rabbitmq() -> Iterator[mq.VirtualHosts]:
    """A RabbitMQ that all tests share."""
    with mq.rabbitmq_server() as server:
        yield server


@pytest.fixture(scope="session")
def redis() -> Iterator[rd.Keyspaces]:
    """A Redis that all tests share."""
    with rd.redis_server() as server:
        yield server


@pytest.fixture
def database_url(postgres: pg.Databases) -> Iterator[str]:
    """A new empty database, dropped afterwards."""
    url = postgres.create_database()
    yield url
    postgres.drop_database(url)


@pytest.fixture
def vhost_url(rabbitmq: mq.VirtualHosts) -> Iterator[str]:
    """A new empty virtual host, dropped afterwards."""
    url = rabbitmq.create_vhost()
    yield url
    rabbitmq.drop_vhost(url)


@pytest.fixture
def redis_url(redis: rd.Keyspaces) -> Iterator[str]:
    """A new empty database of Redis, emptied afterwards."""
    url = redis.create_keyspace()
    yield url
    redis.drop_keyspace(url)


@pytest.fixture(scope="session")
def _restartable_postgres() -> Iterator[pg.Postgres]:
    _skip_if_given(pg.URL_VARIABLE)
    with pg.Postgres() as server:
        yield server


@pytest.fixture(scope="session")
def _restartable_rabbitmq() -> Iterator[mq.RabbitMQ]:
    _skip_if_given(mq.URL_VARIABLE)
    with mq.RabbitMQ() as server:
        yield server


@pytest.fixture(scope="session")
def _restartable_redis() -> Iterator[rd.Redis]:
    _skip_if_given(rd.URL_VARIABLE)
    with rd.Redis() as server:
        yield server


@pytest.fixture
def own_postgres(_restartable_postgres: pg.Postgres) -> pg.Postgres:
    """A PostgreSQL, running, that the test may stop, kill and restart without disturbing others."""
    _restartable_postgres.start()
    return _restartable_postgres


@pytest.fixture
def own_rabbitmq(_restartable_rabbitmq: mq.RabbitMQ) -> mq.RabbitMQ:
    """A RabbitMQ, running, that the test may stop, kill and restart without disturbing others."""
    _restartable_rabbitmq.start()
    return _restartable_rabbitmq


@pytest.fixture
def own_redis(_restartable_redis: rd.Redis) -> rd.Redis:
    """A Redis, running, that the test may stop, kill and restart without disturbing others."""
    _restartable_redis.start()
    return _restartable_redis


def _skip_if_given(variable: str) -> None:
    if variable in os.environ:
        pytest.skip(f"{variable} names a server that tests may not restart")
