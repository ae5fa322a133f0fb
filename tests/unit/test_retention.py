"""Retention: when a relay cleans up, what it deletes, and what it never does. On SQLite."""

import importlib
import logging
import subprocess
import sys
import threading
from datetime import UTC, datetime, timedelta

import pytest
import sqlalchemy as sa
from click.testing import CliRunner
from sqlalchemy import event

from outbox.cli import main
from outbox.errors import ConfigurationError
from outbox.inbox.errors import InvalidMessageId
from outbox.inbox.retention import forget
from outbox.policies import Policies
from outbox.publishers.memory import MemoryPublisher
from outbox.relay import Relay, Transactions, cleanup
from outbox.relay.cleanup import Cleanup
from outbox.relay.stopping import Stopping
from outbox.states import State
from outbox.store import retention
from outbox.store.engine import open_engine
from outbox.tables import DEFAULT
from tests.rows import insert, message, row_of, sqlite_database, states

NOW = datetime.now(UTC)
DAY = timedelta(days=1)
LONG_AGO = NOW - 10_000 * DAY


@pytest.fixture(autouse=True)
def small_batches(monkeypatch):
    monkeypatch.setattr(cleanup, "BATCH", 3)


class Clock:
    """A clock that stands still until it is moved on."""

    def __init__(self):
        self.now = 1000.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


def cleaner(engine, clock, *, days=7, inbox_days=None):
    inbox_retention_s = None if inbox_days is None else inbox_days * 86_400.0
    return Cleanup(engine, DEFAULT, retention_s=days and days * 86_400.0, inbox_retention_s=inbox_retention_s, clock=clock)


@pytest.fixture(autouse=True)
def now_of_this_test(monkeypatch):
    """The suite takes longer than the minutes that these tests tell apart."""
    monkeypatch.setitem(globals(), "NOW", datetime.now(UTC))


def insert_sent(engine, *ages):
    return [insert(engine, None, state=State.SENT, sent_at=NOW - age)[0] for age in ages]


def insert_processed(engine, *ages, consumer="shipping"):
    with engine.begin() as connection:
        first = connection.execute(sa.select(sa.func.count()).select_from(DEFAULT.processed)).scalar_one()
        rows = [{"consumer": consumer, "message_id": str(first + n), "processed_at": NOW - age} for n, age in enumerate(ages)]
        connection.execute(sa.insert(DEFAULT.processed), rows)


def insert_relays(engine, **ages):
    rows = [{"owner": owner, "version": "1", "broker": "memory", "seen_at": NOW - age} for owner, age in ages.items()]
    with engine.begin() as connection:
        connection.execute(sa.insert(DEFAULT.relay), rows)


def column(engine, wanted):
    with engine.connect() as connection:
        return list(connection.execute(sa.select(wanted).order_by(wanted)).scalars())


def count(engine, table):
    with engine.connect() as connection:
        return connection.execute(sa.select(sa.func.count()).select_from(table)).scalar_one()


class Statements:
    """Notes the DELETE statements."""

    def __init__(self, engine):
        self.all = []
        event.listen(engine, "before_cursor_execute", self)

    def __call__(self, _connection, _cursor, statement, *_):
        if statement.startswith("DELETE"):
            self.all.append(statement.split()[2])

    def take(self):
        taken, self.all = self.all, []
        return taken


# What becomes of a message that was sent


class Once(Stopping):
    """Lets a relay run until it has nothing to do."""

    def __init__(self):
        self.event = threading.Event()
        super().__init__(self.event, grace_s=0)

    def wait(self, timeout_s):
        if timeout_s > 0:
            self.event.set()


def run_relay(engine, *, keep_sent, clean_up=None, stopping=None):
    publisher = MemoryPublisher()
    transactions = Transactions(
        engine, DEFAULT, owner="relay", lease_s=30, batch_size=100, policies=Policies(), keep_sent=keep_sent
    )
    Relay(transactions, publisher, stopping or Once(), lease_s=30, poll_interval_s=0.5, cleanup=clean_up).run()
    return publisher


def test_a_sent_message_is_kept_with_its_time_and_published_only_once(engine):
    (message_id,) = insert(engine, "a")
    assert len(run_relay(engine, keep_sent=True).published) == 1
    assert run_relay(engine, keep_sent=True).published == []

    row = row_of(engine, message_id)
    assert row["state"] == "sent"
    assert abs(row["sent_at"] - datetime.now(UTC)) < timedelta(minutes=1)


def test_without_a_retention_a_sent_message_is_deleted_at_once(engine):
    insert(engine, "a")
    run_relay(engine, keep_sent=False)

    assert states(engine) == []


def test_the_loop_cleans_up_after_its_work(engine, clock):
    (old,) = insert_sent(engine, 8 * DAY)
    insert(engine, "a")
    publisher = run_relay(engine, keep_sent=True, clean_up=cleaner(engine, clock))

    assert len(publisher.published) == 1
    assert states(engine) == ["sent"]
    assert old not in column(engine, message.c.message_id)


def test_a_relay_that_is_asked_to_stop_cleans_up_nothing_more(engine, clock):
    insert_sent(engine, 8 * DAY)
    stopping = Once()

    class StopsInItsTurn(MemoryPublisher):
        def tick(self):
            stopping.event.set()

    transactions = Transactions(engine, DEFAULT, owner="relay", lease_s=30, batch_size=100, policies=Policies())
    Relay(transactions, StopsInItsTurn(), stopping, lease_s=30, poll_interval_s=0.5, cleanup=cleaner(engine, clock)).run()

    assert states(engine) == ["sent"]


# What is deleted


def test_sent_messages_are_deleted_after_their_time_and_not_before(engine, clock):
    _, kept = insert_sent(engine, 7 * DAY + timedelta(minutes=5), 7 * DAY - timedelta(minutes=5))
    cleaner(engine, clock).turn()

    assert column(engine, message.c.message_id) == [kept]


def test_unsent_messages_are_never_deleted_whatever_their_age(engine, clock):
    old = {"created_at": LONG_AGO, "available_at": LONG_AGO}
    insert(engine, None, **old)
    insert(engine, None, **old, state=State.SCHEDULED)
    insert(engine, "a", **old, state=State.DEAD, dead_at=LONG_AGO, holds=True)
    insert(engine, "a", **old, state=State.BLOCKED, holds=True)
    before = states(engine)
    clean_up = cleaner(engine, clock, days=1)
    for _ in range(5):
        clean_up.turn()
        clock.now += 100

    assert states(engine) == before


def test_without_a_retention_nobody_touches_what_was_kept(engine, clock):
    """Another relay may still have one."""
    insert_sent(engine, 1000 * DAY)
    insert_processed(engine, 1000 * DAY)
    clean_up = cleaner(engine, clock, days=None)
    for _ in range(5):
        clean_up.turn()
        clock.now += 100

    assert (count(engine, message), count(engine, DEFAULT.processed)) == (1, 1)


def test_records_of_handled_messages_are_deleted_after_their_own_time(engine, clock):
    insert_processed(engine, 31 * DAY, 29 * DAY)
    insert_processed(engine, 31 * DAY, consumer="billing")
    insert_sent(engine, 29 * DAY)
    clean_up = cleaner(engine, clock, days=None, inbox_days=30)
    for _ in range(3):
        clean_up.turn()

    assert column(engine, DEFAULT.processed.c.message_id) == ["1"]
    assert states(engine) == ["sent"]


def test_relays_that_were_not_seen_for_a_day_are_deleted(engine, clock):
    insert_relays(engine, gone=timedelta(hours=25), back=timedelta(hours=23))
    cleaner(engine, clock, days=None).turn()

    assert column(engine, DEFAULT.relay.c.owner) == ["back"]


def test_the_oldest_go_first(engine, clock):
    ages = [days * DAY for days in (11, 14, 12, 13, 10, 15)]
    insert_sent(engine, *ages)
    cleaner(engine, clock).turn()

    assert column(engine, message.c.sent_at) == [NOW - days * DAY for days in (12, 11, 10)]


def test_more_messages_of_one_moment_than_a_batch_are_all_deleted(engine, clock):
    """All messages of a batch are sent at the same time by the database's clock."""
    insert_sent(engine, *[8 * DAY] * 10)
    clean_up = cleaner(engine, clock, days=7)
    for _ in range(8):
        clean_up.turn()

    assert states(engine) == []


# When


def test_full_batches_follow_each_other_one_a_turn_and_then_there_is_a_pause(engine, clock):
    insert_sent(engine, *[8 * DAY] * 7)
    clean_up, statements = cleaner(engine, clock), Statements(engine)
    turns = []
    for _ in range(8):
        clean_up.turn()
        turns.append(statements.take())

    assert all(len(turn) <= 1 for turn in turns)
    assert [turn for turns_ in turns for turn in turns_].count("outbox_message") == 3
    assert turns[-3:] == [[], [], []]


def test_the_next_look_comes_a_minute_after_one_that_found_less_than_a_batch(engine, clock):
    clean_up, statements = cleaner(engine, clock, inbox_days=30), Statements(engine)
    for _ in range(5):
        clean_up.turn()
    assert sorted(statements.take()) == ["outbox_message", "outbox_relay", "processed_messages"]

    clock.now += 59.9
    clean_up.turn()
    assert statements.take() == []

    clock.now += 15.2
    for _ in range(5):
        clean_up.turn()
    assert sorted(statements.take()) == ["outbox_message", "outbox_relay", "processed_messages"]


def test_one_kind_with_much_to_do_does_not_keep_the_others_waiting(engine, clock):
    insert_sent(engine, *[8 * DAY] * 30)
    clean_up, statements = cleaner(engine, clock, inbox_days=30), Statements(engine)
    for _ in range(4):
        clean_up.turn()
        clock.now += 0.1

    assert {"outbox_relay", "processed_messages"} <= set(statements.take())


def test_whoever_finds_another_at_it_leaves_for_a_minute(engine, clock, monkeypatch):
    monkeypatch.setattr(retention, "try_lock", lambda *_: False)
    insert_sent(engine, *[8 * DAY] * 9)
    clean_up, begun = cleaner(engine, clock), []
    event.listen(engine, "begin", lambda _connection: begun.append(1))
    for _ in range(5):
        clean_up.turn()

    assert len(begun) == 2, "once for each kind"
    assert len(states(engine)) == 9


def test_a_clean_up_that_fails_is_said_once_and_tried_again_after_a_minute(engine, clock, caplog):
    insert_sent(engine, 8 * DAY)
    fails = [True]

    @event.listens_for(engine, "before_cursor_execute")
    def fail(_connection, _cursor, statement, *_):
        if fails and statement.startswith("DELETE"):
            raise sa.exc.OperationalError(statement, {}, Exception("canceling statement\nCONTEXT: x"))

    clean_up = cleaner(engine, clock)
    for _ in range(5):
        clean_up.turn()
    assert [(record.message, record.error) for record in caplog.records] == [("clean-up failed", "canceling statement")]
    assert states(engine) == ["sent"]

    fails.clear()
    clock.now += 75.1
    clean_up.turn()
    clean_up.turn()
    assert states(engine) == []


def test_a_batch_begins_where_the_last_one_ended_and_once_an_hour_at_the_start(engine, clock):
    insert_sent(engine, *[9 * DAY] * 3)
    clean_up = cleaner(engine, clock)
    for _ in range(3):
        clean_up.turn()
    (passed_over,) = insert_sent(engine, 12 * DAY)
    clock.now += 100
    for _ in range(3):
        clean_up.turn()
    assert column(engine, message.c.message_id) == [passed_over]

    clock.now += 3600
    for _ in range(3):
        clean_up.turn()
    assert states(engine) == []


def test_what_was_deleted_is_said_at_most_once_a_minute(engine, clock, caplog):
    caplog.set_level(logging.INFO)
    insert_sent(engine, *[8 * DAY] * 7)
    insert_relays(engine, gone=2 * DAY)
    clean_up = cleaner(engine, clock)
    for _ in range(8):
        clean_up.turn()
        clock.now += 1
    said = [record for record in caplog.records if record.message == "cleaned up"]
    assert len(said) == 1
    clock.now += 60
    clean_up.turn()
    clock.now += 60
    clean_up.turn()

    said = [record for record in caplog.records if record.message == "cleaned up"]
    assert len(said) == 2
    assert sum(record.messages for record in said) == 7
    assert sum(record.relays for record in said) == 1


def test_a_clean_up_that_finds_nothing_says_nothing(engine, clock, caplog):
    caplog.set_level(logging.INFO)
    clean_up = cleaner(engine, clock)
    for _ in range(3):
        clean_up.turn()
        clock.now += 100

    assert caplog.records == []


def test_on_sqlite_a_look_walks_the_index_as_far_as_it_deletes(engine):
    plans = []
    with engine.connect() as connection:

        @event.listens_for(engine, "before_cursor_execute")
        def explain(_connection, cursor, statement, parameters, *_):
            if statement.startswith("DELETE"):
                cursor.execute(f"EXPLAIN QUERY PLAN {statement}", parameters)
                plans.append([row[3] for row in cursor.fetchall()])

        retention.expire_sent(connection, DEFAULT, older_than_s=60, since=None, most=10)
        retention.expire_processed(connection, DEFAULT, older_than_s=60, since=None, most=10)

    for plan, index in zip(plans, ("outbox_message_sent_ix", "processed_messages_processed_at_ix"), strict=True):
        assert any(index in step for step in plan), plan
        assert not any(step.startswith("SCAN") or "TEMP B-TREE" in step for step in plan), plan


# For consumers with a database of their own


def test_forget_deletes_one_consumers_old_records_in_bounded_batches(engine):
    insert_processed(engine, *[31 * DAY] * 5, 29 * DAY)
    insert_processed(engine, 31 * DAY, consumer="billing")
    deleted = []
    for _ in range(4):
        with engine.begin() as connection:
            deleted.append(forget(connection, "shipping", timedelta(days=30), 2))

    assert deleted == [2, 2, 1, 0]
    assert column(engine, DEFAULT.processed.c.consumer) == ["billing", "shipping"]


def test_forget_commits_nothing(engine):
    insert_processed(engine, 31 * DAY)
    with engine.connect() as connection:
        assert forget(connection, "shipping", timedelta(days=30)) == 1
        connection.rollback()

    assert count(engine, DEFAULT.processed) == 1


@pytest.mark.parametrize(("older_than", "most"), [(timedelta(0), 1), (timedelta(seconds=-1), 1), (timedelta(1), 0)])
def test_forget_refuses_to_forget_what_is_new(engine, older_than, most):
    with engine.connect() as connection, pytest.raises(ConfigurationError, match="more than zero"):
        forget(connection, "shipping", older_than, most)


def test_forget_wants_a_consumers_name(engine):
    with engine.connect() as connection, pytest.raises(InvalidMessageId, match="consumer"):
        forget(connection, "", timedelta(days=30))


def test_forget_loads_sqlalchemy_and_nothing_heavier():
    heavy = ["kombu", "amqp", "psycopg", "click", "alembic"]
    program = f"import sys, outbox.inbox.retention; print([m for m in {heavy} if m in sys.modules])"
    run = subprocess.run([sys.executable, "-W", "error", "-c", program], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "[]"


# The command line


@pytest.fixture
def settings_of(monkeypatch):
    """Run `outbox-relay run` up to where the relay would start; return its settings."""
    module = importlib.import_module("outbox.cli.run")
    found = []
    monkeypatch.setattr(module, "run_relay", lambda settings, _stop, **_more: found.append(settings))
    monkeypatch.setattr(module, "stop_on_signals", threading.Event)
    monkeypatch.setattr(module.logs, "setup", lambda *_, **__: None)

    def settings_of(*arguments, **environment):
        urls = ["--database-url", "sqlite:///x", "--broker-url", "memory://"]
        result = CliRunner().invoke(main, ["run", *urls, *arguments], env=environment)
        assert result.exit_code == 0, result.output
        settings = found.pop()
        return settings.retention_s, settings.inbox_retention_s

    return settings_of


def test_both_times_come_from_flags_the_environment_or_the_file(settings_of, tmp_path):
    file = tmp_path / "relay.toml"
    file.write_text('retention = "3d"\ninbox_retention = "60d"\n', encoding="utf-8")

    assert settings_of() == (None, None)
    assert settings_of("--config", str(file)) == (3 * 86_400, 60 * 86_400)
    assert settings_of(OUTBOX_RETENTION="7d", OUTBOX_INBOX_RETENTION="30d") == (7 * 86_400, 30 * 86_400)
    assert settings_of("--retention", "1h", "--inbox-retention", "2h") == (3600, 7200)


def test_a_time_that_is_too_short_ends_the_command_with_the_sum():
    urls = ["--database-url", "sqlite:///x", "--broker-url", "memory://"]
    result = CliRunner().invoke(main, ["run", *urls, "--inbox-retention", "10m"])

    assert result.exit_code == 2
    assert "inbox-retention (600 s) must be longer" in result.stderr
    assert "3551 s, of which 3511 s are for retries" in result.stderr


def test_the_relay_takes_both_times_from_its_settings(tmp_path):
    from outbox.relay.service import run_relay as service
    from outbox.settings import RelaySettings

    engine = sqlite_database(tmp_path)
    insert_sent(engine, 8 * DAY)
    (fresh,) = insert(engine, "a")
    url = f"sqlite:///{tmp_path / 'outbox.db'}"
    stop = threading.Event()
    settings = RelaySettings(database_url=url, broker_url="memory://", retention_s=7 * 86_400.0, allow_unconfirmed=True)
    watched = open_engine(url)
    thread = threading.Thread(target=service, args=(settings, stop))
    thread.start()
    try:
        for _ in range(500):
            if states(watched) == ["sent"]:
                break
            stop.wait(0.02)
    finally:
        stop.set()
        thread.join()

    assert column(watched, message.c.message_id) == [fresh]
    watched.dispose()
    engine.dispose()
