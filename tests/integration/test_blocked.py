"""A relay as a real process while RabbitMQ has a memory alarm: it waits, says so, and afterwards nothing has come twice."""

import json
import threading

import pytest
import sqlalchemy as sa
from click.testing import CliRunner

from outbox.cli import main
from outbox.tables import DEFAULT
from tests.faults import processes
from tests.faults.observer import Observer
from tests.integration.consuming import until
from tests.rows import database, insert, message

ALARM_S = 6  # twice the confirm timeout: without a word from the broker the connection would count as lost


@pytest.mark.timeout(240)
def test_under_a_memory_alarm_the_relay_waits_on_its_connection_and_afterwards_all_arrive_once(database_url, own_rabbitmq):
    engine = database(database_url)
    broker_url = own_rabbitmq.create_vhost()
    observer = Observer(broker_url)
    with processes.relay("relay", database_url, broker_url) as relay:
        until(lambda: broker_states(database_url) == ["connected"])
        sent = insert(engine, *keys(10))
        until(lambda: left(engine) == 0)
        before = connections(own_rabbitmq)
        own_rabbitmq.ctl("set_vm_memory_high_watermark", "0.00001")
        try:
            sent += insert(engine, *keys(300))
            until(lambda: broker_states(database_url) == ["blocked"])
            (shown,) = status(database_url)["relays"]
            seen = [connections(own_rabbitmq)]
            wait(ALARM_S)
            sent += insert(engine, *keys(50))
            wait(ALARM_S)
            seen.append(connections(own_rabbitmq))
            assert seen == [before, before], "the same connection, and no other"
            assert left(engine) == 350
            assert broker_states(database_url) == ["blocked"]
            (still,) = status(database_url)["relays"]
            assert (still["owner"], still["silent"]) == (shown["owner"], False)
            assert "  broker blocked  seen " in text(database_url)
            assert relay.process.poll() is None
        finally:
            own_rabbitmq.ctl("set_vm_memory_high_watermark", "0.4")

        attempts = sa.select(sa.func.max(message.c.attempts), sa.func.count(message.c.last_error))
        with engine.connect() as connection:
            assert connection.execute(attempts).one() in ((0, 0), (None, 0))
        until(lambda: left(engine) == 0)
        until(lambda: broker_states(database_url) == ["connected"])
        assert connections(own_rabbitmq) == before
        assert "server away" not in relay.log
        assert relay.terminate() == 0
    assert status(database_url)["relays"] == []
    arrived = [each.properties["message_id"] for each in observer.received()]
    assert sorted(arrived) == sorted(str(each) for each in sent)
    with engine.connect() as connection:
        assert connection.execute(sa.select(sa.func.sum(DEFAULT.partition.c.failed))).scalar_one() == 0
    engine.dispose()
    own_rabbitmq.drop_vhost(broker_url)


def test_a_stop_under_a_memory_alarm_ends_in_order(database_url, own_rabbitmq):
    engine = database(database_url)
    broker_url = own_rabbitmq.create_vhost()
    Observer(broker_url)
    with processes.relay("relay", database_url, broker_url, "--grace", "2s") as relay:
        until(lambda: broker_states(database_url) == ["connected"])
        own_rabbitmq.ctl("set_vm_memory_high_watermark", "0.00001")
        try:
            insert(engine, *keys(20))
            until(lambda: broker_states(database_url) == ["blocked"])
            assert relay.terminate(timeout_s=20) == 0
        finally:
            own_rabbitmq.ctl("set_vm_memory_high_watermark", "0.4")
    found = status(database_url)
    assert (found["relays"], found["leases"], left(engine)) == ([], [], 20)
    engine.dispose()
    own_rabbitmq.drop_vhost(broker_url)


def keys(number):
    return [f"k{each % 20}" if each % 3 else None for each in range(number)]


def wait(seconds):
    threading.Event().wait(seconds)


def connections(server):
    """The broker's connections: the port that each came from."""
    return sorted(server.ctl("--quiet", "list_connections", "peer_port", "--no-table-headers").split())


def left(engine):
    with engine.connect() as connection:
        return connection.execute(sa.select(sa.func.count()).select_from(message)).scalar_one()


def text(url, *options):
    done = CliRunner().invoke(main, ["status", "--database-url", url, *options])
    assert done.exit_code == 0, done.output
    return done.output


def status(url):
    return json.loads(text(url, "--json"))


def broker_states(url):
    return [each["broker"] for each in status(url)["relays"]]
