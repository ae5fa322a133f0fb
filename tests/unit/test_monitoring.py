"""The alerts and the dashboard of examples/monitoring: Prometheus reads them, and they ask for what there is."""

import re
import shlex
import shutil
import subprocess
from itertools import combinations

import pytest
import yaml

from tests import monitored
from tests.commandlines import parameters

URLS = {"OUTBOX_DATABASE_URL": "postgresql://shop@postgres/shop"}
promtool = pytest.mark.skipif(not shutil.which("promtool"), reason="promtool (Debian's package prometheus) is not installed")
UNITS = {"none", "s", "mps", "percentunit"}
# What relays and consumers show, without what Prometheus adds to a histogram.
METRICS = {
    *("outbox_published_total", "outbox_attempts_total", "outbox_dead_total", "outbox_fenced_batches_total"),
    *("outbox_publish_duration_seconds", "outbox_delivery_latency_seconds", "outbox_batch_messages"),
    *("outbox_lease_renewals_total", "outbox_oldest_deliverable_age_seconds", "outbox_messages", "outbox_messages_capped"),
    *("outbox_broker_state", "outbox_breaker_open", "outbox_blocked_connection", "outbox_database_up"),
    *("outbox_relays_alive", "outbox_build_info"),
    *("outbox_consumer_handled_total", "outbox_consumer_duplicates_total", "outbox_consumer_retried_total"),
    *("outbox_consumer_dead_total", "outbox_handler_duration_seconds", "outbox_consumer_failed_messages"),
}
RULES = [pytest.param(rule, id=rule["alert"]) for rule in monitored.rules()]
PANELS = [pytest.param(panel, id=panel["title"]) for panel in monitored.panels()]


def run(*command, at=monitored.FOLDER):
    done = subprocess.run(command, cwd=at, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def unknown(expression):
    """The metrics that an expression names and nobody shows."""
    return {re.sub(r"_(bucket|count|sum)$", "", name) for name in monitored.metrics(expression)} - METRICS


# --- The alerts


@promtool
def test_prometheus_takes_the_configuration_and_its_rules():
    run("promtool", "check", "config", "prometheus.yml")


@promtool
def test_each_alert_fires_when_it_should_and_only_then():
    run("promtool", "test", "rules", "alerts_test.yaml")


@pytest.mark.parametrize("rule", RULES)
def test_an_alert_is_tested_both_ways(rule):
    said = yaml.safe_load((monitored.FOLDER / "alerts_test.yaml").read_text())["tests"]
    asked = [each for test in said for each in test["promql_expr_test"] if f'"{rule["alert"]}"' in each["expr"]]
    assert {"exp_samples" in each for each in asked} == {True, False}


@pytest.mark.parametrize("rule", RULES)
def test_an_alert_waits_says_how_bad_it_is_and_what_to_run(rule):
    assert rule["for"]
    assert rule["labels"]["severity"] in {"warning", "critical"}
    assert rule["annotations"]["summary"]
    commands = re.findall(r"`(outbox-[^`]+)`", rule["annotations"]["description"])
    assert commands
    for command in commands:
        parameters(shlex.split(command), URLS)


@pytest.mark.parametrize("rule", RULES)
def test_an_alert_asks_for_metrics_that_there_are(rule):
    assert not unknown(rule["expr"])


# --- The dashboard


@promtool
def test_prometheus_understands_every_query_of_the_dashboard(tmp_path):
    rules = [{"record": f"outbox:q{number}", "expr": expr} for number, (_, expr) in enumerate(monitored.queries())]
    assert len(rules) > len(PANELS)
    (tmp_path / "queries.yaml").write_text(yaml.safe_dump({"groups": [{"name": "queries", "rules": rules}]}))
    run("promtool", "check", "rules", "queries.yaml", at=tmp_path)


@pytest.mark.parametrize("panel", PANELS)
def test_a_panel_asks_for_metrics_that_there_are_of_the_jobs_that_were_chosen(panel):
    for target in panel["targets"]:
        assert not unknown(target["expr"])
        assert target["expr"].count('job=~"$job"') == len(re.findall(r"\boutbox_\w+", target["expr"]))


@pytest.mark.parametrize("panel", PANELS)
def test_a_panel_says_its_unit_what_is_bad_and_what_to_do(panel):
    defaults = panel["fieldConfig"]["defaults"]
    assert defaults["unit"] in UNITS
    assert defaults["thresholds"]["steps"][0]["value"] is None
    assert len(panel["description"]) > 60
    assert panel["datasource"] == {"type": "prometheus", "uid": "${datasource}"}
    for command in re.findall(r"`(outbox-[^`]+)`", panel["description"]):
        parameters(shlex.split(command), URLS)


def test_every_metric_is_on_the_dashboard():
    shown = set().union(*(monitored.metrics(expr) for _, expr in monitored.queries()))
    assert {re.sub(r"_(bucket|count|sum)$", "", name) for name in shown} == METRICS


def test_no_two_panels_are_in_one_place_or_have_one_id():
    everything = monitored.dashboard()["panels"]
    assert len({panel["id"] for panel in everything}) == len(everything)
    for one, other in combinations([panel["gridPos"] for panel in everything], 2):
        apart = one["x"] + one["w"] <= other["x"] or other["x"] + other["w"] <= one["x"]
        above = one["y"] + one["h"] <= other["y"] or other["y"] + other["h"] <= one["y"]
        assert apart or above
    assert all(panel["gridPos"]["x"] + panel["gridPos"]["w"] <= 24 for panel in everything)


def test_the_dashboard_asks_for_its_data_source_and_job():
    variables = {each["name"]: each for each in monitored.dashboard()["templating"]["list"]}
    assert {name: each["type"] for name, each in variables.items()} == {"datasource": "datasource", "job": "query"}
    assert not unknown(variables["job"]["query"]["query"])


def test_the_list_of_metrics_is_what_the_programs_register():
    client = pytest.importorskip("prometheus_client")
    relay = pytest.importorskip("outbox.observe.relay_metrics", reason="this release shows no metrics yet")
    consumer = pytest.importorskip("outbox.observe.consumer_metrics")
    registries = client.CollectorRegistry(), client.CollectorRegistry()
    relay.RelayMetrics(registries[0], nothing_to_read)
    consumer.ConsumerMetrics(registries[1], nothing_to_read, consumer="shipping")
    ending = {"counter": "_total", "info": "_info"}
    shown = {each.name + ending.get(each.type, "") for registry in registries for each in registry.collect()}
    assert shown <= METRICS  # what comes from the database and from the command is missing here


def nothing_to_read():
    raise RuntimeError


def test_the_readme_names_every_alert():
    readme = (monitored.FOLDER / "README.md").read_text()
    assert {rule["alert"] for rule in monitored.rules()} == set(re.findall(r"`(Outbox\w+)`", readme))
