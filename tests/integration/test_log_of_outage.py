"""How much a relay and a consumer log while a server is away: a few lines, whatever they were doing."""

import json
import threading

import pytest

from tests.faults import processes, shop
from tests.faults.observer import Observer
from tests.integration.consuming import until
from tests.rows import database, insert

MOST_PER_MINUTE = 40


@pytest.fixture(params=[3.0, pytest.param(60.0, marks=pytest.mark.matrix)])
def outage_s(request):
    return request.param


def at_work(database_url, vhost_url):
    engine = database(database_url)
    shop.metadata.create_all(engine)
    with engine.begin() as connection:
        for number in range(50):
            insert(connection, f"key-{number}", payload=b'{"number": "%d"}' % number)
    engine.dispose()
    options = ("--log-format", "json", "--health", "127.0.0.1:0")
    return [
        processes.consumer("consumer", database_url, vhost_url, *options),
        processes.relay("relay", database_url, vhost_url, *options),
    ]


def objects(program, *, after=0):
    """What a program has logged, each line as the object that it is."""
    return [json.loads(line) for line in program.log.splitlines()[after:]]


def lines_of(programs, stop, start, outage_s):
    """Stop a server, wait, start it again; return what each program has logged meanwhile, and until it was back."""
    before = [len(program.log.splitlines()) for program in programs]
    stop()
    threading.Event().wait(outage_s)
    start()
    for program, lines in zip(programs, before, strict=True):
        until(lambda program=program, lines=lines: [o for o in objects(program, after=lines) if o["message"] == "server back"])
    return [objects(program, after=lines) for program, lines in zip(programs, before, strict=True)]


@pytest.mark.timeout(240)
def test_an_outage_of_the_database_is_a_few_lines(own_postgres, vhost_url, outage_s):
    Observer(vhost_url)
    url = own_postgres.create_database()
    consumer, relay = at_work(url, vhost_url)
    with consumer:
        consumer.wait_until_ready()
        with relay:
            relay.wait_until_ready()
            found = lines_of([consumer, relay], own_postgres.stop, own_postgres.start, outage_s)
            assert (relay.terminate(), consumer.terminate()) == (0, 0)
    own_postgres.drop_database(url)

    check(found, outage_s, "database")


@pytest.mark.timeout(240)
def test_an_outage_of_the_broker_is_a_few_lines(database_url, own_rabbitmq, outage_s):
    url = own_rabbitmq.create_vhost()
    Observer(url)
    consumer, relay = at_work(database_url, url)
    with consumer:
        consumer.wait_until_ready()
        with relay:
            relay.wait_until_ready()
            found = lines_of([consumer, relay], own_rabbitmq.stop, own_rabbitmq.start, outage_s)
            assert (relay.terminate(), consumer.terminate()) == (0, 0)
    own_rabbitmq.drop_vhost(url)

    check(found, outage_s, "broker")


def check(found, outage_s, server):
    for lines in found:
        for line in lines:
            print(line)
        # What is said at the beginning and at the end is said however short it was.
        assert len(lines) < max(10, MOST_PER_MINUTE * outage_s / 60)
        assert {line["server"] for line in lines if line["message"].startswith("server away")} >= {server}
        assert {"ts", "level", "logger", "message"} <= set.intersection(*(set(line) for line in lines))
