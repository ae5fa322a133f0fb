"""Through TLS to RabbitMQ, Redis and PostgreSQL: who is not who he should be is refused, and lost connections are made again."""

import re
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from click.testing import CliRunner
from sqlalchemy.exc import OperationalError

import outbox
from outbox.broker import tls
from outbox.cli import main
from outbox.cli.exit import BROKER
from outbox.errors import BrokerRefused, BrokerUnavailable
from outbox.inbox.runner import Runner
from outbox.migrations import LATEST
from outbox.migrations.sql import apply
from outbox.publishers.base import Publisher
from outbox.publishers.factory import open_publisher
from outbox.relay.service import run_relay
from outbox.routes import Route, Routes
from outbox.settings import RelaySettings
from outbox.states import Outcome
from outbox.store.engine import open_engine
from outbox.store.listen import Server
from outbox.tables import DEFAULT
from tests.integration.consuming import WAIT_S, Shop, record, running, until
from tests.integration.test_rabbitmq_publisher import Steer, closing_connections, declare, ids_in
from tests.rows import outgoing
from tests.servers.certificates import Authority, Certificate
from tests.servers.encrypted import EncryptedPostgres, EncryptedRabbitMQ, EncryptedRedis
from tests.servers.proc import PrivateServer

ROUTES = Routes((Route("#", exchange="", declare=False),))
NO_ISSUER = r"its certificate is not accepted: self-signed certificate in certificate chain; name .* with --broker-ca"
ANOTHER_HOST = r"its certificate is not accepted: IP address mismatch, .* '127.0.0.1'; connect to it by a name that"
OURS = r"it refuses our certificate, or that we show none|it has ended the TLS connection; .*--broker-cert"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("certificates")
    for each in (path, *path.parents[:2]):  # the server of PostgreSQL is another user
        each.chmod(0o755)
    return path


@pytest.fixture(scope="module")
def authority(folder: Path) -> Authority:
    return Authority(folder / "ours")


@pytest.fixture(scope="module")
def stranger(folder: Path) -> Authority:
    return Authority(folder / "theirs")


@pytest.fixture(scope="module")
def rabbitmq(authority: Authority) -> Iterator[EncryptedRabbitMQ]:
    yield from started(EncryptedRabbitMQ(authority))


@pytest.fixture(scope="module")
def redis(authority: Authority) -> Iterator[EncryptedRedis]:
    yield from started(EncryptedRedis(authority))


@pytest.fixture(scope="module")
def postgres(authority: Authority) -> Iterator[EncryptedPostgres]:
    yield from started(EncryptedPostgres(authority))


def started(server: AbstractContextManager[PrivateServer]) -> Iterator[Any]:
    with server as running_server:
        yield running_server


@pytest.fixture
def vhost(rabbitmq: EncryptedRabbitMQ) -> Iterator[str]:
    url = rabbitmq.create_vhost()
    yield url
    rabbitmq.drop_vhost(url)


def publisher_of(url: str, **files: Path) -> Publisher:
    return open_publisher(with_files(url, **files), ROUTES)


def with_files(url: str, **files: Path) -> str:
    return tls.with_files(url, **{name: str(path) for name, path in files.items()})


def files_of(certificate: Certificate) -> dict[str, Path]:
    return {"cert": certificate.cert, "key": certificate.key}


def error_of_connecting(url: str, **files: Path) -> BrokerUnavailable:
    publisher = publisher_of(url, **files)
    with pytest.raises(BrokerUnavailable) as caught:
        publisher.connect()
    publisher.close()
    return caught.value


def error_matches(error: BaseException, pattern: str) -> None:
    assert re.search(pattern, str(error)), str(error)


def by_address(url: str) -> str:
    return url.replace("localhost", "127.0.0.1")


@pytest.fixture(params=["rabbitmq", "redis", "rq"])
def encrypted(request: pytest.FixtureRequest) -> str:
    """The URL of each kind of broker that is spoken to through TLS."""
    if request.param == "rabbitmq":
        server = request.getfixturevalue("rabbitmq")
        return str(server.encrypted(server.url))
    server = request.getfixturevalue("redis")
    return f"{'rq+' if request.param == 'rq' else ''}{server.encrypted(server.url)}"


def test_an_authority_that_was_named_is_trusted(encrypted: str, authority: Authority) -> None:
    publisher = publisher_of(encrypted, ca=authority.ca)
    publisher.connect()
    publisher.close()


@pytest.mark.parametrize("trusted", ["those of the system", "another one"])
def test_a_certificate_of_an_unknown_authority_is_refused(encrypted: str, stranger: Authority, trusted: str) -> None:
    error = error_of_connecting(encrypted, **({"ca": stranger.ca} if trusted == "another one" else {}))
    assert isinstance(error, BrokerRefused)
    error_matches(error, NO_ISSUER)


def test_a_certificate_of_another_host_is_refused(encrypted: str, authority: Authority) -> None:
    error = error_of_connecting(by_address(encrypted), ca=authority.ca)
    assert isinstance(error, BrokerRefused)
    error_matches(error, ANOTHER_HOST)


def test_only_who_says_so_gets_a_connection_that_is_not_verified(encrypted: str, authority: Authority) -> None:
    for url in (
        f"{by_address(encrypted)}?ssl_check_hostname=false&ssl_ca_certs={authority.ca}",
        f"{by_address(encrypted)}?ssl_cert_reqs=none",
    ):
        publisher = open_publisher(url, ROUTES)
        publisher.connect()
        publisher.close()


def test_of_several_brokers_each_is_verified_by_its_own_name(
    rabbitmq: EncryptedRabbitMQ, vhost: str, authority: Authority
) -> None:
    good = rabbitmq.encrypted(vhost)
    publisher = publisher_of(f"{by_address(good)};{good}", ca=authority.ca)
    with pytest.raises(BrokerRefused, match=ANOTHER_HOST):
        publisher.connect()
    publisher.connect()
    publisher.close()


def test_a_broker_that_wants_a_certificate_gets_it(
    rabbitmq: EncryptedRabbitMQ, vhost: str, authority: Authority, stranger: Authority
) -> None:
    url = rabbitmq.encrypted(vhost, strict=True)
    publisher = publisher_of(url, ca=authority.ca, **files_of(authority.sign("relay")))
    publisher.connect()
    publisher.close()
    error_matches(error_of_connecting(url, ca=authority.ca), OURS)
    error_matches(error_of_connecting(url, ca=authority.ca, **files_of(stranger.sign("relay"))), OURS)


def test_a_port_without_tls_is_said_to_be_one(rabbitmq: EncryptedRabbitMQ, authority: Authority) -> None:
    error = error_of_connecting(rabbitmq.url.replace("amqp://", "amqps://"), ca=authority.ca)
    assert isinstance(error, BrokerRefused)
    error_matches(error, "it does not speak TLS at this port")


def test_a_relay_ends_at_its_start_with_what_is_wrong_with_the_certificate(
    rabbitmq: EncryptedRabbitMQ, vhost: str, database_url: str
) -> None:
    with_tables(database_url).dispose()
    options = ["--database-url", database_url, "--broker-url", rabbitmq.encrypted(vhost)]
    done = CliRunner().invoke(main, ["run", *options])
    assert done.exit_code == BROKER, done.output
    assert "self-signed certificate in certificate chain; name the authority" in done.stderr


def with_tables(url: str) -> sa.Engine:
    engine = open_engine(url)
    with engine.begin() as connection:
        apply(connection, range(1, LATEST + 1))
    return engine


def test_messages_arrive_after_the_connection_was_closed(rabbitmq: EncryptedRabbitMQ, vhost: str, authority: Authority) -> None:
    publisher = publisher_of(rabbitmq.encrypted(vhost), ca=authority.ca)
    declare_queue(vhost)
    publisher.connect()
    rows = [outgoing(number, topic="q") for number in range(1, 2001)]
    published = publisher.publish(rows, closing_connections(rabbitmq))
    assert published.lost is not None
    left = [row for row in rows if published.verdicts[row.id].outcome is not Outcome.CONFIRMED]
    assert left
    publisher.connect()
    assert {verdict.outcome for verdict in publisher.publish(left, Steer()).verdicts.values()} == {Outcome.CONFIRMED}
    publisher.close()
    assert set(ids_in(vhost, "q")) == {str(row.message_id) for row in rows}


def declare_queue(url: str) -> None:
    declare(url, "q")


def test_a_body_of_megabytes_arrives_whole(rabbitmq: EncryptedRabbitMQ, vhost: str, authority: Authority) -> None:
    publisher = publisher_of(rabbitmq.encrypted(vhost), ca=authority.ca)
    declare_queue(vhost)
    publisher.connect()
    rows = [outgoing(number, topic="q", payload=bytes([number]) * 3_000_000) for number in (1, 2)]
    assert {each.outcome for each in publisher.publish(rows, Steer()).verdicts.values()} == {Outcome.CONFIRMED}
    publisher.close()
    assert ids_in(vhost, "q") == [str(row.message_id) for row in rows]


def test_the_connection_to_a_broker_that_hangs_is_given_up_without_its_goodbye(
    rabbitmq: EncryptedRabbitMQ, vhost: str, authority: Authority
) -> None:
    publisher = open_publisher(with_files(rabbitmq.encrypted(vhost), ca=authority.ca), ROUTES, confirm_timeout_s=0.5)
    declare_queue(vhost)
    publisher.connect()
    with rabbitmq.suspended():
        began = time.monotonic()
        published = publisher.publish([outgoing(1, topic="q")], Steer())
        took_s = time.monotonic() - began
    assert published.verdicts[1].outcome is Outcome.UNKNOWN
    assert took_s < 2
    publisher.close()


def test_a_consumer_goes_on_after_the_connection_was_closed(
    rabbitmq: EncryptedRabbitMQ, vhost: str, authority: Authority, database_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    shop = Shop(database_url, vhost)
    shop.inbox.transactional("orders.*")(record)
    shop.declare()
    shop.publish_many(300)
    with running(shop.inbox, with_files(rabbitmq.encrypted(vhost), ca=authority.ca), workers=2) as runner:
        until(lambda: len(shop.effects()) > 20)
        rabbitmq.ctl("close_all_connections", "--global", "maintenance")
        until(lambda: "server away, trying again" in caplog.messages)
        shop.publish("last")
        until(lambda: len(shop.effects()) == 301)
        until(lambda: shop.queued() == 0)
    assert runner.counts["handled"] == 301
    assert len(set(shop.effects())) == 301
    shop.close()


def test_a_consumer_is_refused_with_what_is_wrong_with_the_certificate(
    rabbitmq: EncryptedRabbitMQ, vhost: str, authority: Authority, database_url: str
) -> None:
    shop = Shop(database_url, vhost)
    shop.inbox.transactional("orders.*")(record)
    for url, problem in (
        (rabbitmq.encrypted(vhost), NO_ISSUER),
        (with_files(by_address(rabbitmq.encrypted(vhost)), ca=authority.ca), ANOTHER_HOST),
    ):
        with pytest.raises(BrokerRefused, match=problem):
            Runner(shop.inbox, url).run(threading.Event())
    shop.close()


def test_a_relay_speaks_tls_to_both_servers(
    postgres: EncryptedPostgres, rabbitmq: EncryptedRabbitMQ, vhost: str, authority: Authority
) -> None:
    url = postgres.encrypted(postgres.create_database())
    engine = with_tables(url)
    declare_queue(vhost)
    settings = RelaySettings(
        database_url=url, broker_url=with_files(rabbitmq.encrypted(vhost), ca=authority.ca), routes=ROUTES, wake="postgres"
    )
    with engine.begin() as connection:
        outbox.enqueue(connection, outbox.Event(topic="q", payload={}))
    with working(lambda stop: run_relay(settings, stop)):
        until(lambda: left(engine) == 0)
        with engine.connect() as connection:
            query = "SELECT count(*), count(*) FILTER (WHERE ssl) FROM pg_stat_ssl JOIN pg_stat_activity USING (pid)"
            ours = sa.text(f"{query} WHERE datname = current_database() AND application_name LIKE 'outbox-relay%'")
            connections, with_tls = connection.execute(ours).one()
    assert connections == with_tls >= 3
    assert len(ids_in(vhost, "q")) == 1
    engine.dispose()


def left(engine: sa.Engine) -> int:
    with engine.connect() as connection:
        return connection.execute(sa.select(sa.func.count()).select_from(DEFAULT.message)).scalar_one()


class working:  # noqa: N801 - reads as a function
    """Run something in a thread until the end of the block."""

    def __init__(self, run: Callable[[threading.Event], None]) -> None:
        self._stop = threading.Event()
        self._thread = threading.Thread(target=run, args=(self._stop,), daemon=True)

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join(WAIT_S)
        assert not self._thread.is_alive()


def test_a_database_that_is_not_who_it_should_be_is_refused(postgres: EncryptedPostgres, stranger: Authority) -> None:
    for url, problem in (
        (postgres.encrypted(postgres.url, sslrootcert=str(stranger.ca)), "certificate verify failed"),
        (by_address(postgres.encrypted(postgres.url)), 'certificate for "localhost" .*does not match host name "127.0.0.1"'),
    ):
        engine = open_engine(url)
        with pytest.raises(OperationalError, match=problem):
            engine.connect()
        engine.dispose()


def test_a_database_takes_a_certificate_for_a_password(postgres: EncryptedPostgres, authority: Authority) -> None:
    with sa.create_engine(postgres.url, poolclass=sa.NullPool).begin() as connection:
        connection.execute(sa.text("CREATE ROLE certified LOGIN"))
    own = authority.sign("certified")
    query = {"sslcert": str(own.cert), "sslkey": str(own.key)}
    url = sa.make_url(postgres.encrypted(postgres.url, **query))._replace(username="certified", password=None)
    engine = open_engine(url.render_as_string())
    with engine.connect() as connection:
        assert connection.execute(sa.text("SELECT current_user")).scalar_one() == "certified"
    engine.dispose()
    with Server.at(url.render_as_string()).connect() as plain:
        assert plain.pgconn.ssl_in_use


@pytest.mark.parametrize(
    ("url", "problem"),
    [
        ("amqp://h//?ssl_ca_certs=/ca.pem", "one of amqp:// and has ssl_ca_certs; for TLS write amqps://"),
        ("redis://h/0?ssl_ca_certs=/ca.pem", "for TLS write rediss://"),
        ("rq+redis://h/0?ssl_cert_reqs=none", "for TLS write rq\\+rediss://"),
        ("amqp://h//?ssl=true", "one of amqp:// and has ssl; for TLS write amqps://"),
        ("amqps://h//?ssl=true", "has ssl; for TLS write amqps://"),
        ("amqps://h//?ssl_cert_reqs=maybe", "ssl_cert_reqs=maybe; write required or none"),
        ("amqps://h//?ssl_check_hostname=no", "ssl_check_hostname=no; write true or false"),
        ("amqps://h//?ssl_ca_certs=/absent.pem", "/absent.pem: No such file or directory"),
        ("amqps://h//?ssl_keyfile=/some.key", "without its certificate"),
        ("amqps://h//?sslmode=verify-full", "has an option in its query that its transport does not know"),
    ],
)
def test_options_of_tls_that_cannot_work_are_refused_before_anything_is_connected(url: str, problem: str) -> None:
    with pytest.raises(outbox.ConfigurationError, match=problem):
        open_publisher(url, ROUTES)


def test_a_key_that_is_not_the_certificates_is_refused(authority: Authority, stranger: Authority) -> None:
    url = with_files("amqps://h", cert=authority.sign("relay").cert, key=stranger.sign("relay").key)
    with pytest.raises(outbox.ConfigurationError, match="key values mismatch"):
        open_publisher(url, ROUTES)


def test_certificates_for_a_broker_without_tls_are_refused(authority: Authority) -> None:
    for url in ("amqp://h", "sqs://", "amqps://h;amqp://h"):
        with pytest.raises(outbox.ConfigurationError, match="broker-ca, broker-cert and broker-key are for amqps://"):
            with_files(url, ca=authority.ca)
