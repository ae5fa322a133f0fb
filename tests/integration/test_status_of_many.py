"""What a look at the outbox costs, and that it finds the oldest: it must be as quick among millions as among ten."""

import json
from datetime import UTC, datetime, timedelta

import pytest
import sqlalchemy as sa
from click.testing import CliRunner

from outbox.cli import main
from outbox.states import State
from outbox.store import stats as stats_module
from outbox.store.oldest import oldest_unsent_s
from outbox.store.stats import MOST_COUNTED, count, stats
from outbox.tables import DEFAULT
from tests.integration.test_store_postgres import analyze, explained, generate, nodes, scans
from tests.rows import database, insert, sqlite_database

INDEXES = {state: f"outbox_message_{state}_ix" for state in State}
HOUR = timedelta(hours=1)


@pytest.fixture(params=["sqlite", "postgresql"])
def engine(request, tmp_path):
    engine = sqlite_database(tmp_path) if request.param == "sqlite" else database(request.getfixturevalue("database_url"))
    yield engine
    engine.dispose()


@pytest.fixture
def postgres_engine(database_url):
    engine = database(database_url)
    yield engine
    engine.dispose()


def oldest(engine):
    with engine.connect() as connection:
        found = oldest_unsent_s(connection, DEFAULT)
    return None if found is None else pytest.approx(found, abs=20)


def ago(hours):
    then = datetime.now(UTC) - hours * HOUR
    return {"created_at": then, "available_at": then}


# What is counted


def test_a_state_is_counted_up_to_a_bound_and_no_further(engine, monkeypatch):
    monkeypatch.setattr(stats_module, "MOST_COUNTED", 5)
    insert(engine, *"abcd")
    insert(engine, *"abcdefg", state=State.BLOCKED)
    insert(engine, *"abcde", state=State.SENT, sent_at=datetime.now(UTC))
    with engine.connect() as connection:
        found = stats(connection, DEFAULT)

    assert found.messages == {"scheduled": 0, "pending": 4, "blocked": 5, "sent": 5, "dead": 0}
    assert found.counted_up_to == 5


def test_the_command_shows_that_there_are_more(engine, monkeypatch):
    monkeypatch.setattr(stats_module, "MOST_COUNTED", 5)
    insert(engine, *"abcdefg")
    url = engine.url.render_as_string(hide_password=False)
    text, plain = (CliRunner().invoke(main, ["status", "--database-url", url, *more]).stdout for more in ((), ("--json",)))

    assert text.startswith("messages       scheduled 0  pending 5+  blocked 0  sent 0  dead 0\n")
    assert (json.loads(plain)["messages"]["pending"], json.loads(plain)["counted_up_to"]) == (5, 5)


# Which is the oldest


@pytest.mark.parametrize("number", range(3))
def test_the_oldest_is_found_in_whatever_partition_or_topic_it_waits(engine, number):
    keys = [f"key-{each}" for each in range(100)]
    insert(engine, *keys[:50], **ago(1))
    for place, topic in enumerate(("a.a", "b.b", "c.c")):
        insert(engine, *keys[50:], topic=topic, state=State.BLOCKED, **ago(3 if place == number else 2))

    assert oldest(engine) == 3 * 3600


def test_a_stuck_partition_is_not_hidden_by_the_work_in_others(engine, monkeypatch):
    insert(engine, *[None] * 300, partition=1, **ago(1))
    insert(engine, None, partition=63, **ago(2))

    assert oldest(engine) == 2 * 3600


def test_what_the_application_delayed_counts_from_when_it_was_due_and_hides_nobody(engine):
    insert(engine, "a", created_at=datetime.now(UTC) - 9 * HOUR, available_at=datetime.now(UTC))
    insert(engine, "a", **ago(1))

    assert oldest(engine) == 3600


def test_what_backs_off_counts_from_its_beginning_and_what_is_delayed_does_not(engine):
    later = datetime.now(UTC) + HOUR
    insert(engine, "a", state=State.SCHEDULED, created_at=datetime.now(UTC) - 9 * HOUR, available_at=later)
    assert oldest(engine) is None
    insert(engine, "b", state=State.SCHEDULED, created_at=datetime.now(UTC) - HOUR, available_at=later, last_error="x")

    assert oldest(engine) == 3600


def test_the_sent_and_the_dead_are_not_unsent(engine):
    insert(engine, "a", state=State.SENT, sent_at=datetime.now(UTC), **ago(9))
    insert(engine, "a", state=State.DEAD, dead_at=datetime.now(UTC), **ago(9))

    assert oldest(engine) is None


# What it costs


@pytest.mark.parametrize("statistics", ["fresh", "of another time"])
def test_a_look_reads_a_bounded_part_of_each_states_own_index(postgres_engine, statistics):
    """Also when the statistics say that there is nothing, as after a sudden outage."""
    with postgres_engine.begin() as connection:
        generate(connection, 2000, "'pending'", key="NULL", place="n % 64")
    analyze(postgres_engine)
    with postgres_engine.begin() as connection:
        generate(connection, 25_000, "'pending'", key="NULL", place="n % 64", due="now() - interval '1 hour'")
        generate(connection, 25_000, "'scheduled'", key="NULL", place="n % 64")
        generate(connection, 25_000, "'blocked'")
        generate(connection, 25_000, "'dead'", key="NULL", place="n % 64")
    if statistics == "fresh":
        analyze(postgres_engine)
    for state in (State.PENDING, State.SCHEDULED, State.BLOCKED, State.DEAD):
        met, indexes = read_by(postgres_engine, lambda connection, state=state: count(connection, DEFAULT, state))
        assert (met, indexes) == (MOST_COUNTED, {INDEXES[state]})
    met, indexes = read_by(postgres_engine, lambda connection: oldest_unsent_s(connection, DEFAULT))

    assert indexes - {"outbox_partition_pk"} == {INDEXES[state] for state in (State.PENDING, State.SCHEDULED, State.BLOCKED)}
    assert met <= 10_000 + 64 * 100 + 100 + 10


def read_by(engine, look):
    """Return how many messages a look has met, and by which indexes."""
    with engine.connect() as connection, explained(connection) as plans:
        look(connection)
        connection.rollback()
    every = [node for plan in plans for node in nodes(plan)]
    assert not any(node["Node Type"] == "Seq Scan" and scans(node) for node in every)
    met = sum(
        (node["Actual Rows"] + node.get("Rows Removed by Filter", 0)) * node["Actual Loops"] for node in every if scans(node)
    )
    return met, {node["Index Name"] for node in every if "Index Name" in node}


@pytest.mark.matrix
def test_among_two_million_it_takes_less_than_a_second(postgres_engine):
    with postgres_engine.begin() as connection:
        for state in ("pending", "scheduled", "blocked", "dead"):
            generate(connection, 500_000, f"'{state}'", key="NULL", place="n % 64")
    with postgres_engine.connect() as connection:
        connection.execute(sa.text("SET statement_timeout = '1s'"))
        found = stats(connection, DEFAULT)

    assert set(found.messages.values()) == {MOST_COUNTED, 0}
