"""Metrics: what is counted, that no label grows without an end, and that a scrape waits for nobody."""

import subprocess
import sys
import threading
import time
import urllib.request
from urllib.error import HTTPError

import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.parser import text_string_to_metric_families

from outbox.errors import DatabaseUnavailable
from outbox.http.health import answering
from outbox.http.metrics import exposing, missing
from outbox.observe import gauges as gauges_module
from outbox.observe.consumer_metrics import ConsumerMetrics
from outbox.observe.distribution import Distribution
from outbox.observe.relay_metrics import RelayMetrics
from outbox.observe.topics import OTHER, Topics
from outbox.publishers.flight import CONFIRMED
from outbox.states import Outcome, State, Verdict
from outbox.store.failed_stats import FailedCounts, failed_counts
from outbox.store.gauges import Gauges, gauges
from outbox.tables import DEFAULT
from outbox.telemetry import (
    BatchClaimed,
    BatchFenced,
    BatchPublished,
    BreakerChanged,
    BrokerStateChanged,
    DuplicateDropped,
    HandlingEnded,
    LeaseRenewed,
    MessageDied,
    MessageHandled,
    MessageRetried,
    PublishGivenUp,
)
from outbox.vitals import Vitals
from tests.rows import insert, outgoing, sqlite_database

FOUND = Gauges(dict.fromkeys(State, 0) | {State.PENDING: 7, State.DEAD: 5000}, 5000, 12.5, 2)


def values(registry, accept=""):
    """Every sample by name and values of its labels, in the order of the labels' names; not those that say when a series began."""
    text = exposing(registry)(accept).body
    samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
    return {
        (each.name, *dict(sorted(each.labels.items())).values()): each.value
        for each in samples
        if not each.name.endswith("_created")
    }


@pytest.fixture
def registry():
    return CollectorRegistry()


@pytest.fixture
def relay(registry):
    return RelayMetrics(registry, lambda: FOUND)


def published(*rows_and_verdicts, seconds=0.2, since_claim_s=0.3):
    rows = [outgoing(number, topic=topic) for number, (topic, _) in enumerate(rows_and_verdicts)]
    verdicts = {number: verdict for number, (_, verdict) in enumerate(rows_and_verdicts)}
    return BatchPublished(rows, verdicts, seconds, since_claim_s)


# A relay's


def test_a_batch_is_counted_by_topic_and_outcome(registry, relay):
    rejected, held = Verdict(Outcome.REJECTED, "x"), Verdict(Outcome.HELD)
    relay(published(("a", CONFIRMED), ("a", CONFIRMED), ("b", rejected), ("b", held)))
    relay(published(("a", CONFIRMED)))
    found = values(registry)

    assert found["outbox_published_total", "confirmed", "a"] == 3
    assert found["outbox_published_total", "rejected", "b"] == 1
    assert found["outbox_published_total", "held", "b"] == 1
    assert (found["outbox_attempts_total", "a"], found["outbox_attempts_total", "b"]) == (3, 1)
    assert (found["outbox_batch_messages_count",], found["outbox_batch_messages_sum",]) == (2, 5)
    assert found["outbox_publish_duration_seconds_sum",] == pytest.approx(0.4)


def test_latency_is_the_age_at_the_read_and_the_time_since(registry, relay):
    relay(published(("a", CONFIRMED), ("a", Verdict(Outcome.UNKNOWN)), since_claim_s=0.3))  # the rows are a second old
    found = values(registry)

    assert found["outbox_delivery_latency_seconds_count",] == 1
    assert found["outbox_delivery_latency_seconds_sum",] == pytest.approx(1.3)
    assert (found["outbox_delivery_latency_seconds_bucket", "1.0"], found["outbox_delivery_latency_seconds_bucket", "2.5"]) == (
        0,
        1,
    )
    assert found["outbox_delivery_latency_seconds_bucket", "+Inf"] == 1


def test_what_else_a_relay_tells_is_counted(registry, relay):
    for event in (
        BatchFenced(3),
        LeaseRenewed(2, 2),
        LeaseRenewed(2, 2),
        PublishGivenUp(outgoing().message_id, "a", {}, 3, "x", "X"),
        BrokerStateChanged("blocked"),
        BreakerChanged(open=True),
        BatchClaimed(1, 0, 1, 0.1),
    ):
        relay(event)
    found = values(registry)

    assert found["outbox_fenced_batches_total",] == 1
    assert found["outbox_lease_renewals_total",] == 2
    assert found["outbox_dead_total", "a"] == 1
    states = {state: found["outbox_broker_state", state] for state in ("connected", "blocked", "unreachable")}
    assert states == {"connected": 0, "blocked": 1, "unreachable": 0}
    assert (found["outbox_blocked_connection",], found["outbox_breaker_open",]) == (1, 1)
    for event in (BrokerStateChanged("connected"), BreakerChanged(open=False)):
        relay(event)
    found = values(registry)
    assert (found["outbox_broker_state", "connected"], found["outbox_broker_state", "blocked"]) == (1, 0)
    assert (found["outbox_blocked_connection",], found["outbox_breaker_open",]) == (0, 0)


def test_the_database_is_shown_with_what_is_counted_up_to_a_bound(registry, relay):
    found = values(registry)

    assert {state: found["outbox_messages", state] for state in State} == FOUND.messages
    assert (found["outbox_messages_capped", "pending"], found["outbox_messages_capped", "dead"]) == (0, 1)
    assert found["outbox_oldest_deliverable_age_seconds",] == 12.5
    assert found["outbox_relays_alive",] == 2
    assert found["outbox_database_up",] == 1


# A consumer's


def test_a_consumers_tries_are_counted_by_topic(registry):
    metrics = ConsumerMetrics(registry, lambda: FailedCounts({"retry": 3}, frozenset({"retry"})), consumer="shipping")
    about = {"consumer": "shipping", "message_id": "m", "topic": "orders.placed", "headers": {}}
    why = {"attempts": 1, "error": ValueError(), "reason": "x", "explained": False}
    for event in (
        HandlingEnded(**about, handler="orders.*", seconds=0.5, ran=True),
        MessageHandled(**about, handler="orders.*"),
        HandlingEnded(**about, handler="orders.*", seconds=0.5, ran=False),
        DuplicateDropped(**about),
        MessageRetried(**about, **why, retry_in_s=1.0),
        MessageDied(**about, **why),
    ):
        metrics(event)
    found = values(registry)

    for name in ("handled", "duplicates", "retried", "dead"):
        assert found[f"outbox_consumer_{name}_total", "shipping", "orders.placed"] == 1
    assert found["outbox_handler_duration_seconds_count", "shipping", "orders.*"] == 1
    assert found["outbox_handler_duration_seconds_sum", "shipping", "orders.*"] == 0.5
    assert found["outbox_consumer_failed_messages", "shipping", "retry"] == 3
    assert found["outbox_consumer_failed_messages_capped", "shipping", "retry"] == 1
    assert found["outbox_database_up",] == 1


# No label without an end


def test_topics_that_carry_ids_end_up_in_one_label(registry, relay):
    for number in range(0, 1000, 10):
        relay(published(*((f"order.{each}", CONFIRMED) for each in range(number, number + 10))))
    found = {key[2]: value for key, value in values(registry).items() if key[0] == "outbox_published_total"}

    assert len(found) == 101
    assert found[OTHER] == 900
    assert found["order.99"] == 1


def test_as_many_topics_are_kept_whoever_asks_at_once():
    topics, labels = Topics(most=10), set()

    def ask():
        for number in range(1000):
            labels.add(topics(f"topic-{number}"))

    threads = [threading.Thread(target=ask) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(labels) == 11


def test_a_distribution_counts_like_the_clients_own():
    def of(collector):
        (family,) = collector.collect()
        return {(sample.name, *sample.labels.values()): sample.value for sample in family.samples if "created" not in sample.name}

    from prometheus_client import Histogram

    bounds = [0.1, 1.0, 10.0]
    mine, theirs = Distribution("a", "A.", bounds=bounds), Histogram("a", "A.", buckets=bounds, registry=None)
    some = [0.0, 0.1, 0.100001, 1.0, 5.0, 10.0, 11.0, 1e9]
    mine.add(some)
    for value in some:
        theirs.observe(value)

    assert of(mine) == of(theirs)


# A scrape waits for nobody


def test_a_database_that_fails_leaves_the_rest_of_the_scrape(registry):
    def fail():
        raise DatabaseUnavailable("gone")

    relay = RelayMetrics(registry, fail)
    relay(published(("a", CONFIRMED)))
    found = values(registry)

    assert found["outbox_database_up",] == 0
    assert found["outbox_published_total", "confirmed", "a"] == 1
    assert not [key for key in found if key[0] in ("outbox_messages", "outbox_oldest_deliverable_age_seconds")], "rather than old"


def test_a_database_that_hangs_is_waited_for_once_for_a_moment(registry, monkeypatch):
    monkeypatch.setattr(gauges_module, "LIMIT_S", 0.2)
    go, looks = threading.Event(), []

    def hang():
        looks.append(1)
        go.wait(20)
        return FOUND

    relay = RelayMetrics(registry, hang)
    relay(published(("a", CONFIRMED)))
    began = time.monotonic()
    for _ in range(20):
        found = values(registry)
        assert (found["outbox_database_up",], found["outbox_published_total", "confirmed", "a"]) == (0, 1)
    assert time.monotonic() - began < 2
    assert looks == [1]
    go.set()
    while not values(registry)["outbox_database_up",]:
        assert time.monotonic() - began < 10


def test_many_scrapes_are_one_look(registry):
    looks = []

    def look():
        looks.append(1)
        return FOUND

    RelayMetrics(registry, look)
    for _ in range(20):
        values(registry)

    assert looks == [1]


# The looks, on SQLite


def test_a_look_at_the_outbox(tmp_path):
    engine = sqlite_database(tmp_path)
    insert(engine, *"abc")
    insert(engine, "d", state=State.BLOCKED)
    with engine.begin() as connection:
        connection.execute(DEFAULT.relay.insert().values(owner="one", version="1", broker="connected"))
        found = gauges(connection, DEFAULT)
    engine.dispose()

    assert found.messages == dict.fromkeys(State, 0) | {State.PENDING: 3, State.BLOCKED: 1}
    assert found.relays_alive == 1
    assert 0 <= found.oldest_deliverable_s < 60


def test_a_look_at_a_consumers_failed_messages(tmp_path):
    engine = sqlite_database(tmp_path)
    state_of = {"retry": 3, "blocked": 1, "dead": 0}
    rows = [(state, f"{state}{number}") for state, count in state_of.items() for number in range(count)]
    with engine.begin() as connection:
        for state, name in rows:
            given = {"consumer": "a", "message_id": name, "topic": "t", "key": name, "payload": b"", "state": state}
            connection.execute(DEFAULT.failed.insert().values(given))
        found, few = (failed_counts(connection, DEFAULT, "a", most=most) for most in (100, 3))
        other = failed_counts(connection, DEFAULT, "b", most=100)
    engine.dispose()

    assert (found.messages, found.capped) == (state_of, frozenset())
    assert few.messages["retry"] == 3
    assert few.capped == {"retry", "blocked"}
    assert other.messages == dict.fromkeys(state_of, 0)


# Over HTTP


def get(address, path, accept=""):
    request = urllib.request.Request(f"http://{address[0]}:{address[1]}{path}", headers={"Accept": accept} if accept else {})
    try:
        with urllib.request.urlopen(request, timeout=5) as response:
            return response.status, response.headers["Content-Type"], response.read().decode()
    except HTTPError as error:
        with error:
            return error.code, error.headers["Content-Type"], error.read().decode()


@pytest.mark.parametrize(
    ("accept", "content_type"),
    [
        ("", "text/plain; version=0.0.4; charset=utf-8"),
        (
            "application/openmetrics-text;version=1.0.0,text/plain;version=0.0.4;q=0.5",
            "application/openmetrics-text; version=1.0.0",
        ),
        ("application/openmetrics-text;version=nonsense", "text/plain; version=0.0.4"),
        ("text/plain;version=;;,,;=", "text/plain; version=0.0.4"),
    ],
)
def test_metrics_are_served_beside_the_health_in_the_form_asked_for(registry, relay, accept, content_type):
    relay(published(("a", CONFIRMED)))
    with answering(("127.0.0.1", 0), Vitals(limit_s=30), metrics=exposing(registry)) as address:
        status, kind, body = get(address, "/metrics", accept)
        assert get(address, "/livez")[0] == 200
    assert status == 200
    assert kind.startswith(content_type)
    assert 'outbox_published_total{outcome="confirmed",topic="a"} 1.0' in body.replace(
        '{topic="a",outcome="confirmed"}', '{outcome="confirmed",topic="a"}'
    )


def test_without_prometheus_client_it_says_what_to_install():
    with answering(("127.0.0.1", 0), Vitals(limit_s=30), metrics=missing) as address:
        status, _, body = get(address, "/metrics")
    assert status == 501
    assert body == "metrics need prometheus-client, which is not installed: pip install 'outbox-relay[metrics]'\n"


def test_where_there_are_no_metrics_it_is_not_found():
    with answering(("127.0.0.1", 0), Vitals(limit_s=30)) as address:
        assert get(address, "/metrics")[0] == 404


def test_the_commands_work_without_prometheus_client_and_ask_it_for_nothing_without_health(tmp_path):
    program = f"""
import sys
sys.modules["prometheus_client"] = None
from outbox.cli.measuring import measuring_consumer, measuring_relay
from outbox.settings import RelaySettings
settings = RelaySettings(database_url="sqlite:///{tmp_path}/x.db", broker_url="memory://")
with measuring_relay(settings, served=True) as measuring:
    print(measuring.subscribers, measuring.answer("").status.value)
print(measuring_consumer("a", lambda: None, served=True).answer("").status.value)
"""
    run = subprocess.run([sys.executable, "-W", "error", "-c", program], capture_output=True, text=True, check=True)
    assert run.stdout == "() 501\n501\n"


def test_the_applications_own_registry_stays_as_it_is(registry, relay):
    from prometheus_client import REGISTRY

    assert not [name for name in REGISTRY._names_to_collectors if name.startswith("outbox")]
