"""The dashboard and the alerts of examples/monitoring with a real Prometheus, which scrapes a real relay and consumer."""

import importlib.util
import shutil
from contextlib import ExitStack

import pytest
from sqlalchemy.orm import Session

from tests import monitored
from tests.faults import processes, shop
from tests.integration.consuming import until
from tests.integration.test_health import port_of
from tests.rows import database
from tests.servers.prometheus import Prometheus

pytestmark = [
    pytest.mark.skipif(not shutil.which("prometheus"), reason="Debian's package prometheus is not installed"),
    pytest.mark.skipif(importlib.util.find_spec("outbox.observe") is None, reason="this release shows no metrics yet"),
]
# Shown from the first time on that it happens.
ONLY_WHEN_IT_HAPPENS = {
    *("outbox_dead_total", "outbox_consumer_duplicates_total", "outbox_consumer_retried_total", "outbox_consumer_dead_total"),
}
OF_FAILURES = 'outcome=~"rejected'


@pytest.fixture
def engine(database_url):
    engine = database(database_url)
    shop.metadata.create_all(engine)
    yield engine
    engine.dispose()


def enqueue(engine, first):
    with Session(engine) as session:
        for number in range(first, first + 20):
            shop.place(session, f"A-{number}", "ann")
        session.commit()


def test_every_query_of_the_dashboard_is_answered_and_no_alert_fires(database_url, vhost_url, engine):
    health = ("--health", "127.0.0.1:0")
    with ExitStack() as stack:
        consumer = stack.enter_context(processes.consumer("consumer", database_url, vhost_url, *health)).wait_until_ready()
        relay = stack.enter_context(processes.relay("relay", database_url, vhost_url, *health)).wait_until_ready()
        targets = {"relay": f"127.0.0.1:{port_of(relay)}", "consumer": f"127.0.0.1:{port_of(consumer)}"}
        prometheus = stack.enter_context(Prometheus(targets, rules=[monitored.ALERTS]))
        wanted = {
            (title, expr)
            for title, expr in monitored.queries()
            if not monitored.metrics(expr) & ONLY_WHEN_IT_HAPPENS and OF_FAILURES not in expr
        }
        assert len(wanted) > 20
        sent = 0

        def all_answered():
            nonlocal sent
            enqueue(engine, sent)
            sent += 20
            missing = {each for each in wanted if not prometheus.asks("query", query=each[1])["result"]}
            wanted.intersection_update(missing)
            return not wanted

        until(all_answered)
        (groups,) = prometheus.asks("rules").values()
        found = [rule for group in groups for rule in group["rules"]]
        until(lambda: all(rule["health"] == "ok" for rule in found))
        assert len(found) == len(monitored.rules())
        assert prometheus.asks("alerts")["alerts"] == []
