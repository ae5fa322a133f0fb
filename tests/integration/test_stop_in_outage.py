"""A relay that is told to stop while a server is away: it leaves at once, in order, with nothing left behind."""

import signal
import time
from collections.abc import Iterator

import pytest
import sqlalchemy as sa

from outbox.tables import DEFAULT
from tests.faults import processes
from tests.faults.observer import Observer
from tests.faults.processes import Program
from tests.integration.test_relay import enqueue, left, message_ids, prepared, scalar, until
from tests.servers.postgres import Postgres
from tests.servers.proc import free_port
from tests.servers.rabbitmq import RabbitMQ

AT_ONCE_S = 2.0


@pytest.fixture
def url_of_a_database_that_goes(own_postgres: Postgres) -> Iterator[str]:
    url = own_postgres.create_database()
    yield url
    own_postgres.start()
    own_postgres.drop_database(url)


def ends_in_order(relay: Program, *signals: signal.Signals) -> int:
    """Send the signals; return the exit code of what must have ended at once, without a traceback."""
    began = time.monotonic()
    for number in signals:
        relay.process.send_signal(number)
    code = relay.process.wait(30)
    assert time.monotonic() - began < AT_ONCE_S, relay.log
    assert "Traceback" not in relay.log
    return code


def test_with_the_database_down(own_postgres: Postgres, url_of_a_database_that_goes: str, vhost_url: str) -> None:
    engine = prepared(url_of_a_database_that_goes)
    with processes.relay("relay", url_of_a_database_that_goes, vhost_url) as relay:
        relay.wait_until_ready()
        own_postgres.stop()
        relay.wait_for_log("server=database")

        assert ends_in_order(relay, signal.SIGTERM) == 0
        assert "relay stopped" in relay.log
    engine.dispose()


def test_with_the_broker_down(database_url: str) -> None:
    prepared(database_url)
    with processes.relay("relay", database_url, f"amqp://guest:guest@127.0.0.1:{free_port()}//") as relay:
        relay.wait_for_log("server=broker")

        assert ends_in_order(relay, signal.SIGTERM) == 0


def test_with_both_down(own_postgres: Postgres, url_of_a_database_that_goes: str) -> None:
    prepared(url_of_a_database_that_goes)
    with processes.relay("relay", url_of_a_database_that_goes, f"amqp://guest:guest@127.0.0.1:{free_port()}//") as relay:
        relay.wait_for_log("server=broker")
        own_postgres.stop()

        assert ends_in_order(relay, signal.SIGTERM) == 0


def test_a_second_signal_in_the_pause_after_an_error_is_no_accident(database_url: str) -> None:
    """It may find the relay gone already (0) or ends it at once (130); both say so, and neither is a traceback."""
    prepared(database_url)
    with processes.relay("relay", database_url, f"amqp://guest:guest@127.0.0.1:{free_port()}//") as relay:
        relay.wait_for_log("server=broker")

        assert ends_in_order(relay, signal.SIGTERM, signal.SIGTERM) in (0, 130)


def test_what_was_published_before_the_database_went_is_settled_in_the_grace(
    own_postgres: Postgres, url_of_a_database_that_goes: str, own_rabbitmq: RabbitMQ
) -> None:
    """The stop waits for the database here, since what it leaves unsettled would be published again."""
    engine = prepared(url_of_a_database_that_goes)
    broker_url = own_rabbitmq.create_vhost()
    observer = Observer(broker_url)
    with processes.relay("relay", url_of_a_database_that_goes, broker_url, "--confirm-timeout", "3s") as relay:
        enqueue(engine, 1)
        until(lambda: left(engine) == 0)
        with own_rabbitmq.suspended():  # what is in flight has no confirm yet when the database goes
            enqueue(engine, 10, first=1)
            until(lambda: leased(engine) > 0)
            own_postgres.stop()
        relay.wait_for_log("server=database")
        relay.process.send_signal(signal.SIGTERM)
        relay.wait_for_log("stopping")
        own_postgres.start()
        assert relay.process.wait(30) == 0

    assert left(engine) == 0
    assert len(message_ids(observer.received())) == 11
    own_rabbitmq.drop_vhost(broker_url)


def leased(engine: sa.Engine) -> int:
    return scalar(engine, sa.select(sa.func.count(DEFAULT.partition.c.lease_owner)))
