"""Metrics of a relay and a consumer as real processes, also while their servers are away."""

import time

import kombu
from prometheus_client.parser import text_string_to_metric_families

from tests.faults import processes, shop
from tests.faults.observer import Observer
from tests.faults.proxy import Proxy
from tests.integration.consuming import until
from tests.integration.test_health import ask, port_of, relay
from tests.rows import insert


def read(one):
    """Every sample by name and values of its labels, in the order of the labels' names."""
    status, text = one("/metrics")
    assert status == 200
    samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
    return {(each.name, *dict(sorted(each.labels.items())).values()): each.value for each in samples}


def test_a_relay_shows_what_it_published_and_what_is_left(database_url, vhost_url, engine):
    with kombu.Connection(vhost_url) as connection, connection.channel() as channel:
        kombu.Queue("some", kombu.Exchange("outbox", type="topic"), routing_key="orders.*")(channel).declare()
    insert(engine, *"abc")
    insert(engine, "d", topic="nobody.listens")
    with relay("one", database_url, vhost_url, "--max-attempts", "1") as (one, program):
        until(lambda: read(one).get(("outbox_published_total", "confirmed", "orders.placed")) == 3)
        until(lambda: read(one).get(("outbox_messages", "dead")) == 1)
        found = read(one)
        assert program.terminate() == 0

    assert found["outbox_published_total", "rejected", "nobody.listens"] == 1
    assert found["outbox_dead_total", "nobody.listens"] == 1
    assert found["outbox_messages", "pending"] == 0
    assert found["outbox_delivery_latency_seconds_count",] == 3
    assert 0 < found["outbox_delivery_latency_seconds_sum",] < 60
    assert found["outbox_broker_state", "connected"] == 1
    assert (found["outbox_database_up",], found["outbox_relays_alive",], found["outbox_breaker_open",]) == (1, 1, 0)
    assert [key for key in found if key[0] == "outbox_build_info"]


def test_a_database_that_hangs_takes_its_own_gauges_out_of_a_scrape_and_nothing_else(database_url, vhost_url, engine):
    Observer(vhost_url)
    insert(engine, *"abc")
    with Proxy(database_url) as proxy, relay("one", proxy.url, vhost_url) as (one, program):
        until(lambda: read(one).get(("outbox_published_total", "confirmed", "orders.placed")) == 3)
        proxy.stall()
        until(lambda: read(one)["outbox_database_up",] == 0)
        began = time.monotonic()
        found = read(one)
        assert time.monotonic() - began < 2
        assert found["outbox_published_total", "confirmed", "orders.placed"] == 3
        assert ("outbox_messages", "pending") not in found
        proxy.resume()
        until(lambda: read(one)["outbox_database_up",] == 1)
        assert program.terminate() == 0


def test_a_consumer_shows_what_it_has_handled_and_what_failed(database_url, vhost_url, engine):
    shop.metadata.create_all(engine)
    Observer(vhost_url)
    with processes.consumer("one", database_url, vhost_url, "--health", "127.0.0.1:0") as program:
        program.wait_until_ready()
        port = port_of(program)

        def one(path):
            return ask(port, path)

        with engine.begin() as connection:
            insert(connection, "a", payload=b'{"number": "1"}')
            insert(connection, "b", payload=b"nonsense")
        with relay("relay", database_url, vhost_url):
            until(lambda: read(one).get(("outbox_consumer_handled_total", "work", "orders.placed")) == 1)
            until(lambda: read(one).get(("outbox_consumer_dead_total", "work", "orders.placed")) == 1)
        until(lambda: read(one).get(("outbox_consumer_failed_messages", "work", "dead")) == 1)
        found = read(one)
        assert program.terminate() == 0

    assert found["outbox_handler_duration_seconds_count", "work", "orders.*"] == 2
    assert (found["outbox_database_up",], found["outbox_broker_state", "connected"]) == (1, 1)
