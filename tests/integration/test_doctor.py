"""`outbox-relay doctor` finds each fault that is planted, and no other; in a system that is well it finds nothing."""

import gc
import socket
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import kombu
import pytest
import sqlalchemy as sa
from click.testing import CliRunner

from outbox import __version__
from outbox.cli import main
from outbox.cli.exit import FOUND, USAGE
from outbox.doctor import messages, routing, run, server, vacuum
from outbox.doctor.checks import NAMES
from outbox.doctor.findings import Finding
from outbox.doctor.scope import Database, DatabaseCheck
from outbox.states import State
from outbox.store import registry
from outbox.store.engine import open_engine
from outbox.store.registry import Broker
from outbox.tables import DEFAULT
from tests.diagnosing import QUEUE, System, declare_consumer, of_level
from tests.faults import processes
from tests.faults.proxy import Proxy
from tests.integration.test_relay import until
from tests.rows import database, sqlite_database
from tests.servers.pgbouncer import transaction_pooler
from tests.servers.postgres import Databases
from tests.servers.proc import free_port
from tests.servers.rabbitmq import VirtualHosts
from tests.servers.roles import roles

NOW = datetime.now(UTC)
AGO = NOW - timedelta(minutes=10)
PENDING = {"created_at": AGO, "available_at": AGO}
DIED = {"state": State.DEAD, "dead_at": AGO, "attempts": 20, "error_class": "Unroutable", "last_error": "no queue is bound"}
LIGHT = ("--skip", "schema")  # what takes half of the time
ROUTE = '[[routes]]\ntopics = "{topics}"\nexchange = "{exchange}"\nrouting_key = "{topics}"\n{more}\n'


@pytest.fixture(scope="module")
def model(postgres: Databases) -> Iterator[str]:
    """A database in which all is well, for each test to have a copy of."""
    url = postgres.create_database()
    engine = database(url)
    with engine.begin() as connection:
        registry.note(connection, DEFAULT, owner="web-1", version=__version__, broker=Broker.CONNECTED)
        connection.exec_driver_sql("UPDATE outbox_relay SET seen_at = now() + interval '1 hour'")  # as long as tests may take
    engine.dispose()
    yield url
    postgres.drop_database(url)


@pytest.fixture(scope="module")
def well_vhost(rabbitmq: VirtualHosts) -> Iterator[str]:
    """A virtual host in which all is well."""
    if not rabbitmq.management_url:
        pytest.skip("this broker was given without a management URL")
    url = rabbitmq.create_vhost()
    declare_consumer(url)
    yield url
    rabbitmq.drop_vhost(url)


@pytest.fixture
def system(postgres: Databases, rabbitmq: VirtualHosts, model: str, well_vhost: str, tmp_path: Path) -> Iterator[System]:
    """A system with a database of its own."""
    url = postgres.create_database(like=model)
    found = System(url, well_vhost, rabbitmq.management_url, open_engine(url), tmp_path, ExitStack())
    yield found
    found.close()
    postgres.drop_database(url)


@pytest.fixture
def broker_system(model: str, vhost_url: str, rabbitmq: VirtualHosts, well_vhost: str, tmp_path: Path) -> Iterator[System]:
    """A system with a virtual host of its own."""
    declare_consumer(vhost_url)
    found = System(model, vhost_url, rabbitmq.management_url, open_engine(model), tmp_path, ExitStack())
    yield found
    found.sql("DELETE FROM outbox_message")
    found.close()


def as_relay(system: System, *statements: str) -> None:
    """Let the doctor log in as a relay whose role has lost something."""
    urls = system.later.enter_context(roles(system.database_url))
    name = sa.make_url(urls["relay"]).username
    system.sql(*(statement.format(relay=name) for statement in statements))
    system.options["--database-url"] = urls["relay"]


def others_setting(system: System) -> None:
    urls = system.later.enter_context(roles(system.database_url))
    system.sql(f"ALTER ROLE {sa.make_url(urls['application']).username} SET synchronous_commit = off")


def slot(system: System) -> None:
    name = "doctor"
    system.sql(f"SELECT pg_create_physical_replication_slot('{name}', true)")
    system.later.callback(system.sql, f"SELECT pg_drop_replication_slot('{name}')")


def dead_rows(system: System) -> None:
    system.messages(*"abcdefgh")
    with system.engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        connection.exec_driver_sql("DELETE FROM outbox_message")
        connection.exec_driver_sql("SELECT pg_stat_force_next_flush()")


def pooled(system: System, option: str) -> None:
    system.options[option] = system.later.enter_context(transaction_pooler(system.database_url))


def blocked_by_dead(system: System) -> None:
    system.messages("7", **DIED, holds=True)
    system.messages("7", state=State.BLOCKED, holds=True)


def paused(system: System, values: str = "('orders.#', now() - interval '2 hours', NULL)") -> None:
    system.sql(f"INSERT INTO outbox_pause (topics, paused_at, resumed_at) VALUES {values}")
    system.messages(None, state=State.BLOCKED)


def silent(system: System) -> None:
    system.relay("web-2")
    system.sql("UPDATE outbox_relay SET seen_at = now() - interval '10 minutes' WHERE owner = 'web-2'")


def unconsumed(system: System) -> None:
    system.config(ROUTE.format(topics="orders.placed", exchange="outbox", more=f'queues = ["{QUEUE}"]'))
    with system.channel() as channel:
        kombu.Producer(channel).publish({}, exchange="", routing_key=QUEUE)
        until(lambda: channel.queue_declare(QUEUE, passive=True).message_count == 1)


def no_exchange(system: System, more: str = "") -> None:
    system.config(ROUTE.format(topics="bills.#", exchange="bills", more=more))


def delete_exchange(system: System) -> None:
    with system.channel() as channel:
        channel.exchange_delete("outbox")


def unbound(system: System) -> None:
    system.queue(QUEUE, bound_to="orders.#", instead=True)
    system.messages(None, topic="nobody.listens")


def policy(system: System) -> None:
    system.policy(max_length=5)
    until(lambda: of_level(system.doctor(*LIGHT), "problem"), timeout_s=20)  # it takes a moment to get to the queues


Planting = Callable[[System], Any]


def sql(*statements: str) -> Planting:
    return lambda system: system.sql(*statements)


def option(name: str, value: str) -> Planting:
    return lambda system: system.options.update({name: value})


def queue(**how: Any) -> Planting:
    return lambda system: system.queue(**how)


# Check, level, what the finding says, how it is planted, and which other checks find the same fault.
PLANTS: dict[str, tuple[str, str, str, Planting, set[str]]] = {
    "read only": ("primary", "problem", "read_only", sql("ALTER DATABASE here SET default_transaction_read_only = on"), set()),
    "no index": ("schema", "problem", "dead_ix is missing", sql("DROP INDEX outbox_message_dead_ix"), set()),
    "another index": (
        "schema",
        "problem",
        "should be",
        sql("DROP INDEX outbox_message_dead_ix", "CREATE INDEX outbox_message_dead_ix ON outbox_message (id)"),
        set(),
    ),
    "invalid index": (
        "schema",
        "problem",
        "outbox_message_pending_ix is invalid",
        sql("UPDATE pg_index SET indisvalid = false WHERE indexrelid = 'outbox_message_pending_ix'::regclass"),
        set(),
    ),
    "no table": ("schema", "problem", "outbox_pause: the table is missing", sql("DROP TABLE outbox_pause"), set()),
    "newer tables": (
        "schema",
        "warning",
        "have version 2",
        sql("ALTER TABLE outbox_message ALTER schema_version SET DEFAULT 2"),
        set(),
    ),
    "a right is missing": (
        "privileges",
        "problem",
        "DELETE on outbox_relay",
        lambda system: as_relay(system, "REVOKE DELETE ON outbox_relay FROM {relay}"),
        set(),
    ),
    "a column's right is missing": (
        "privileges",
        "problem",
        "UPDATE (again) on outbox_message",
        lambda system: as_relay(system, "REVOKE UPDATE (again) ON outbox_message FROM {relay}"),
        set(),
    ),
    "cannot look": (
        "relays",
        "warning",
        "could not be checked: permission denied",
        lambda system: as_relay(system, "REVOKE SELECT ON outbox_relay FROM {relay}"),
        {"privileges"},
    ),
    "asynchronous commit": (
        "durability",
        "problem",
        "synchronous_commit",
        sql("ALTER DATABASE here SET synchronous_commit = off"),
        set(),
    ),
    "asynchronous commit of a role": ("durability", "problem", "is off for outbox_application", others_setting, set()),
    "statement timeout": (
        "timeouts",
        "warning",
        "statement_timeout",
        sql("ALTER DATABASE here SET statement_timeout = 1000"),
        set(),
    ),
    "lock timeout": ("timeouts", "warning", "lock_timeout", sql("ALTER DATABASE here SET lock_timeout = 10"), set()),
    "idle timeout": (
        "timeouts",
        "warning",
        "idle_in_transaction",
        sql("ALTER DATABASE here SET idle_in_transaction_session_timeout = 1000"),
        set(),
    ),
    "listener is cut off": (
        "timeouts",
        "warning",
        "idle_session_timeout",
        lambda system: (
            system.sql("ALTER DATABASE here SET idle_session_timeout = '1h'"),
            system.options.update({"--wake": "postgres"}),
        ),
        set(),
    ),
    "isolation": (
        "isolation",
        "warning",
        "serializable",
        sql("ALTER DATABASE here SET default_transaction_isolation = 'serializable'"),
        set(),
    ),
    "no connections left": (
        "connections",
        "problem",
        "the database",
        lambda system: (
            system.sql("ALTER DATABASE here CONNECTION LIMIT 1"),
            system.later.enter_context(system.engine.connect()),
        ),
        set(),
    ),
    "pooler": ("pooler", "warning", "a pooler", lambda system: pooled(system, "--database-url"), set()),
    "wake through a pooler": (
        "wake",
        "problem",
        "leads through a pooler",
        lambda system: (pooled(system, "--wake-database-url"), system.options.update({"--wake": "postgres"})),
        set(),
    ),
    "slot": ("replication-slots", "warning", "slot doctor is not in use", slot, set()),
    "autovacuum off": (
        "autovacuum",
        "problem",
        "off for outbox_message",
        sql("ALTER TABLE outbox_message SET (autovacuum_enabled = off)"),
        set(),
    ),
    "no relay": ("relays", "problem", "no relay is at work", sql("DELETE FROM outbox_relay"), set()),
    "every relay silent": (
        "relays",
        "problem",
        "last one was seen",
        sql("UPDATE outbox_relay SET seen_at = now() - interval '10 minutes'"),
        set(),
    ),
    "a relay silent": ("relays", "warning", "web-2 was last seen 1", silent, set()),
    "versions": ("relays", "warning", "different versions", lambda system: system.relay("web-2", version="9.9"), set()),
    "relay without broker": (
        "relays",
        "problem",
        "unreachable",
        lambda system: system.relay("web-1", broker=Broker.UNREACHABLE),
        set(),
    ),
    "relay blocked": ("relays", "problem", "blocked", lambda system: system.relay("web-1", broker=Broker.BLOCKED), set()),
    "late": ("late-messages", "problem", "waiting for ", lambda system: system.messages("1", **PENDING), set()),
    "dead": ("dead-letters", "warning", "1 messages are dead", lambda system: system.messages("1", **DIED), set()),
    "dead for long": (
        "dead-letters",
        "warning",
        "longer than --inbox-retention",
        lambda system: system.messages("1", **DIED | {"dead_at": NOW - timedelta(days=90)}),
        set(),
    ),
    "blocked behind a dead one": ("blocked-keys", "warning", "of 1 keys", blocked_by_dead, {"dead-letters"}),
    "paused": ("pauses", "warning", "orders.# is paused for 2 h, and 1 messages wait", paused, set()),
    "resume interrupted": (
        "pauses",
        "warning",
        "has not ended",
        lambda system: paused(system, "('orders.#', now() - interval '2 hours', now())"),
        set(),
    ),
    "far future": (
        "far-future",
        "warning",
        "1 messages",
        lambda system: system.messages("1", state=State.SCHEDULED, available_at=NOW + timedelta(days=20_000)),
        set(),
    ),
    "newer messages": ("newer-messages", "problem", "version 2", lambda system: system.messages("1", schema_version=2), set()),
    "short memory": ("inbox-retention", "problem", "is 60 s", option("--inbox-retention", "60s"), set()),
    "consumer's dead": ("consumers", "warning", "given up 1 messages", lambda system: system.failed("dead", dead_at=AGO), set()),
    "consumer away": ("consumers", "problem", "first due for ", lambda system: system.failed("retry", available_at=AGO), set()),
    "consumer's stuck": ("consumers", "problem", "wait for no other", lambda system: system.failed("blocked", key="7"), set()),
}
BROKER_PLANTS: dict[str, tuple[str, str, str, Planting, set[str]]] = {
    "broker away": (
        "broker",
        "problem",
        "refused",
        option("--broker-url", f"amqp://guest:guest@127.0.0.1:{free_port()}//"),
        {"broker-alarms"},
    ),
    "wrong password": (
        "broker",
        "problem",
        "refuses us",
        lambda system: system.options.update({"--broker-url": system.broker_url.replace("guest:guest", "guest:wrong")}),
        set(),
    ),
    "broker that tells nothing": ("broker", "problem", "does not tell", option("--broker-url", "pyro://localhost"), set()),
    "exchange deleted": ("exchanges", "warning", "exchange outbox", delete_exchange, set()),
    "exchange of others": (
        "exchanges",
        "problem",
        "exchange bills",
        lambda system: no_exchange(system, "declare = false"),
        set(),
    ),
    "queue of a route": (
        "queues",
        "problem",
        "queue bills",
        lambda system: system.config(ROUTE.format(topics="bills", exchange="", more="")),
        {"bindings"},
    ),
    "nobody consumes": ("queues", "warning", "1 messages and no consumer", unconsumed, set()),
    "unroutable": ("bindings", "problem", "for: nobody.listens", unbound, set()),
    "transient queue": ("queue-limits", "problem", "auto-delete", queue(auto_delete=True, like={}), set()),
    "not durable": ("queue-limits", "problem", "not durable", queue(durable=False, like={}), set()),
    "drops the oldest": ("queue-limits", "problem", "max-length = 10", queue(x_max_length=10), set()),
    "drops bytes": ("queue-limits", "problem", "max-length-bytes", queue(x_max_length_bytes=10, x_overflow="drop-head"), set()),
    "messages expire": ("queue-limits", "problem", "message-ttl = 1000 ms", queue(x_message_ttl=1000), set()),
    "queue expires": ("queue-limits", "problem", "expires = 60000000 ms", queue(x_expires=60_000_000), set()),
    "few returns": ("queue-limits", "problem", "after 3 returns", queue(x_delivery_limit=3), set()),
    "dead-letters into nothing": (
        "queue-limits",
        "problem",
        "dead-letter exchange nowhere",
        queue(x_dead_letter_exchange="nowhere"),
        set(),
    ),
    "policy": ("queue-limits", "problem", "max-length = 5", policy, set()),
}
# With a threshold that nothing can stay below.
MEASURED: dict[str, tuple[str, str, str, Any, str, Any, Planting]] = {
    "old version": ("database", "warning", "is older than", server, "OLDEST_VERSION", 99, lambda _: None),
    "old rows": ("transaction-ids", "problem", "transactions old", server, "AGED", -1, lambda _: None),
    "long transaction": ("transactions", "warning", "is open for", vacuum, "LONG_S", 0.0, System.open_transaction),
    "very long": ("transactions", "problem", "pid ", vacuum, "LONG_S", 0.0, System.open_transaction),
    "slot retains": ("replication-slots", "problem", "slot doctor", vacuum, "RETAINED_BYTES", 0, slot),
    "dead rows": ("dead-rows", "warning", "dead rows", vacuum, "DEAD_ROWS", 5, dead_rows),
    "clock": (
        "clock",
        "warning",
        "behind this host's",
        server,
        "time",
        SimpleNamespace(time=lambda: time.time() + 60),
        lambda _: None,
    ),
}


def found_by(report: dict[str, Any], name: str, level: str, words: str, also: set[str]) -> None:
    found = of_level(report, "problem", "warning")
    assert set(found) == {name} | (set(found) & also), found
    matching = [finding for finding in found[name] if words in finding["found"]]
    assert matching, found
    assert matching[0]["level"] == level
    assert matching[0]["consequence"]
    assert matching[0]["remedy"]


@pytest.mark.parametrize("plant", PLANTS)
def test_it_finds_a_fault_and_no_other(plant: str, system: System) -> None:
    name, level, words, planting, also = PLANTS[plant]
    planting(system)

    found_by(system.doctor(*([] if name == "schema" else LIGHT)), name, level, words, also)


@pytest.mark.parametrize("plant", BROKER_PLANTS)
def test_it_finds_a_fault_of_the_broker_and_no_other(plant: str, broker_system: System) -> None:
    name, level, words, planting, also = BROKER_PLANTS[plant]
    planting(broker_system)

    found_by(broker_system.doctor(*LIGHT), name, level, words, also)


@pytest.mark.parametrize("plant", MEASURED)
def test_it_finds_what_is_too_much(plant: str, system: System, monkeypatch: pytest.MonkeyPatch) -> None:
    name, level, words, module, threshold, value, planting = MEASURED[plant]
    monkeypatch.setattr(module, threshold, value)
    if level == "problem" and threshold == "LONG_S":
        monkeypatch.setattr(module, "VERY_LONG_S", 0.0)
    planting(system)

    found_by(system.doctor(*LIGHT), name, level, words, set())


def test_it_knows_the_limit_that_a_newer_rabbitmq_sets_by_itself(broker_system: System, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(routing, "_FIRST_WITH_LIMIT", (3,))
    broker_system.queue(like={"x-queue-type": "quorum"})

    found_by(broker_system.doctor(*LIGHT), "queue-limits", "problem", "archive drops a message after 20 returns", set())


def test_every_check_has_a_fault_that_it_finds() -> None:
    planted = {plant[0] for plant in (*PLANTS.values(), *BROKER_PLANTS.values(), *MEASURED.values())}

    assert set(NAMES) - planted == {"prepared-transactions", "broker-alarms"}  # in test_doctor_servers.py


def test_it_finds_nothing_in_a_system_that_is_well(system: System) -> None:
    system.sql("DELETE FROM outbox_relay")
    with processes.relay("relay", system.database_url, system.broker_url) as relay:
        relay.wait_until_ready()
        system.messages("1", "2")
        until(lambda: system.doctor()["problems"] == 0)
        report = system.doctor("--strict", code=0)
        relay.terminate()

    assert of_level(report, "problem", "warning", "info", "skipped") == {}
    assert [check["name"] for check in report["checks"]] == list(NAMES)


def test_an_operator_may_look_at_everything(system: System) -> None:
    with roles(system.database_url, "--monitor") as urls:
        system.options["--database-url"] = urls["operator"]
        report = system.doctor("--strict", code=0)

    assert set(of_level(report, "info")) == {"privileges"}


def test_a_relay_may_look_at_all_but_the_transactions_of_others(system: System) -> None:
    with roles(system.database_url) as urls:
        system.options["--database-url"] = urls["relay"]
        report = system.doctor("--strict", code=0)

    (finding,) = of_level(report, "info").pop("transactions")
    assert "GRANT pg_monitor" in finding["found"]


def test_it_says_in_one_page_what_is_wrong_what_follows_and_what_to_do(system: System) -> None:
    system.sql("DELETE FROM outbox_relay")
    system.messages("1", **DIED)
    arguments = [word for pair in system.options.items() for word in pair]

    result = CliRunner().invoke(main, ["doctor", *arguments])

    assert result.exit_code == FOUND
    lines = result.stdout.splitlines()
    assert lines[0] == "problem  relays: no relay is at work"
    assert lines[1] == "         so: nothing is published, and messages gather"
    assert lines[2].startswith("         do: start one (outbox-relay run)")
    assert "warning  dead-letters: 1 messages are dead" in result.stdout
    assert lines[-1] == "1 problem, 1 warning"
    assert len(lines) < 40
    assert max(map(len, lines)) <= 110


def test_warnings_count_only_when_it_is_strict(system: System) -> None:
    system.messages("1", **DIED)

    system.doctor(code=0)
    system.doctor("--strict", code=FOUND)
    system.doctor("--strict", "--skip", "dead-letters", code=0)


def test_what_cannot_be_seen_is_said(system: System) -> None:
    del system.options["--management-url"]
    assert "--management-url" in of_level(system.doctor(code=0), "skipped")["bindings"][0]["found"]

    del system.options["--broker-url"]
    assert set(of_level(system.doctor(code=0), "skipped")) == {
        "broker", "exchanges", "queues", "broker-alarms", "bindings", "queue-limits",
    }  # fmt: skip


def test_a_management_api_that_is_away_is_a_finding(system: System) -> None:
    system.options["--management-url"] = f"http://127.0.0.1:{free_port()}"

    assert set(of_level(system.doctor(code=0), "warning")) == {"broker-alarms", "queue-limits"}


def test_it_shows_no_password(system: System) -> None:
    for option_ in ("--database-url", "--broker-url", "--management-url"):
        system.options[option_] = f"{system.options[option_].partition('://')[0]}://me:geheim@127.0.0.1:{free_port()}/x"

    assert "geheim" not in str(system.doctor())


def test_a_database_that_is_away_is_one_finding(system: System) -> None:
    system.options["--database-url"] = f"postgresql://me@127.0.0.1:{free_port()}/shop"

    report = system.doctor(code=FOUND)

    assert set(of_level(report, "problem")) == {"database"}
    assert of_level(report, "warning") == {}


@pytest.mark.parametrize("which", ["--database-url", "--broker-url", "--management-url"])
def test_a_server_that_hangs_does_not_hang_it(system: System, which: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "LIMIT_S", 0.5)
    with socket.create_server(("127.0.0.1", 0)) as hung:  # takes connections and says nothing
        kind = {"--database-url": "postgresql", "--broker-url": "amqp", "--management-url": "http"}[which]
        system.options[which] = f"{kind}://guest:guest@127.0.0.1:{hung.getsockname()[1]}/x"
        began = time.monotonic()
        report = system.doctor(code=FOUND)
        took_s = time.monotonic() - began

    assert took_s < 8
    assert any("no answer" in finding["found"] for findings in of_level(report, "problem").values() for finding in findings)
    let_go()


def test_a_file_that_is_not_there_is_a_problem_and_is_not_made(tmp_path: Path) -> None:
    result = CliRunner().invoke(main, ["doctor", "--json", "--database-url", f"sqlite:///{tmp_path}/none.db"])

    assert result.exit_code == FOUND, result.output
    assert f"there is no file {tmp_path}/none.db" in result.output
    assert list(tmp_path.iterdir()) == []


def let_go() -> None:
    """Wait for what a doctor that has ended has left behind, which in a process of its own ends with that."""
    for thread in threading.enumerate():
        if thread.name == "outbox-doctor":
            thread.join(10)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)  # nobody waits for its connections
        gc.collect()


def test_a_database_that_hangs_half_way_is_a_finding_of_one_check(system: System, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "LIMIT_S", 1.5)

    def stalled(database: Database) -> list[Finding]:
        network.stall()
        return list(server.writable(database))

    monkeypatch.setattr(run, "DATABASE", (run.DATABASE[0], DatabaseCheck("primary", stalled), *run.DATABASE[2:]))
    with Proxy(system.database_url) as network:
        system.options["--database-url"] = network.url
        began = time.monotonic()
        report = system.doctor(code=FOUND)
        took_s = time.monotonic() - began

    assert took_s < 6
    assert of_level(report, "problem")["primary"][0]["found"] == "no answer in 1.5 s"
    assert of_level(report, "skipped")["relays"][0]["found"] == "the check primary had no answer"
    assert of_level(report, "problem", "warning").keys() == {"primary"}
    let_go()


@pytest.mark.parametrize(
    "options",
    [
        ["--database-url", "oracle://x"],
        ["--database-url", "sqlite://", "--broker-url", "nonsense"],
        ["--database-url", "sqlite://", "--broker-url", "amqp://", "--management-url", "ftp://x"],
        ["--database-url", "sqlite://", "--skip", "no-such-check"],
        ["--database-url", "sqlite://", "--wake", "nonsense"],
    ],
)
def test_what_cannot_work_is_said_before_anything_is_looked_at(options: list[str]) -> None:
    result = CliRunner().invoke(main, ["doctor", *options])

    assert result.exit_code == USAGE, result.output
    assert result.stdout == ""


def test_on_sqlite_it_looks_at_what_there_is(tmp_path: Path) -> None:
    engine = sqlite_database(tmp_path)
    system = System(str(engine.url), f"sqla+sqlite:///{tmp_path}/broker.db", "", engine, tmp_path, ExitStack())
    system.relay("web-1")
    system.options = {"--database-url": system.database_url, "--broker-url": system.broker_url}
    well = system.doctor("--strict", code=0)
    blocked_by_dead(system)
    system.messages("8", **PENDING)
    system.messages("9", state=State.SCHEDULED, available_at=NOW + timedelta(days=20_000))
    system.messages("10", schema_version=2)
    system.failed("retry", available_at=AGO)
    paused(system, "('orders.#', '2026-01-01 00:00:00.000000', NULL)")
    ill = system.doctor(code=FOUND)
    system.close()

    assert set(of_level(well, "skipped")) > {"privileges", "bindings"}
    assert set(of_level(ill, "problem", "warning")) == {
        "late-messages", "dead-letters", "blocked-keys", "far-future", "newer-messages", "consumers", "pauses",
    }  # fmt: skip


def test_it_changes_nothing(system: System) -> None:
    blocked_by_dead(system)
    before = [_contents(system), _queues(system)]

    system.doctor()

    assert [_contents(system), _queues(system)] == before


def _contents(system: System) -> list[Any]:
    with system.engine.connect() as connection:
        tables = ("outbox_message", "outbox_partition", "outbox_relay", "outbox_pause", "processed_messages", "failed_messages")
        return [connection.exec_driver_sql(f"SELECT * FROM {table}").all() for table in tables]


def _queues(system: System) -> int:
    with system.channel() as channel:
        return int(channel.queue_declare(QUEUE, passive=True).message_count)


def test_it_looks_at_a_thousand_dead_keys_quickly(system: System, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(messages, "LATE_S", 1e9)
    many = [str(number) for number in range(1000)]
    with system.engine.begin() as connection:
        connection.exec_driver_sql(
            "INSERT INTO outbox_message (message_id, topic, key, partition, type, content_type, payload, state, dead_at, holds)"
            " SELECT gen_random_uuid(), 'orders.placed', n, 0, 'x', 'x', '', s, CASE s WHEN 'dead' THEN now() END, true"
            " FROM generate_series(1, 1000) n, unnest(ARRAY['dead', 'blocked', 'blocked']) s ORDER BY s DESC, n".replace(
                " n,", " n::text,", 1
            )
        )
    report = system.doctor()

    (finding,) = of_level(report, "warning")["blocked-keys"]
    assert f"of {len(many)} keys" in finding["found"]


@pytest.fixture(scope="module", autouse=True)
def _no_thread_is_left(postgres: Databases) -> Iterator[None]:
    yield
    for thread in threading.enumerate():
        if thread.name == "outbox-doctor":
            thread.join(20)
