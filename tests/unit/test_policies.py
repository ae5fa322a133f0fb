"""Retry policies: which one a topic has, what it leads to, and how the TOML file says it."""

import importlib
import threading
from datetime import UTC, datetime, timedelta
from unittest.mock import Mock

import pytest
from click.testing import CliRunner

from outbox.backoff import Backoff
from outbox.cli import main
from outbox.cli.config import policies
from outbox.cli.exit import USAGE
from outbox.errors import ConfigurationError
from outbox.policies import Policies
from outbox.publishers.flight import CONFIRMED
from outbox.publishers.memory import MemoryPublisher
from outbox.relay import Transactions
from outbox.states import OnDead, Outcome, RetryPolicy, State, Verdict, decide
from outbox.store.stats import stats
from outbox.tables import DEFAULT
from tests.rows import insert, row_of, states, update

TOO_LARGE = Verdict(Outcome.UNPUBLISHABLE, "too large", "CannotSerialize")
UNROUTABLE = Verdict(Outcome.REJECTED, "nowhere to go", "Unroutable")
LATER = Backoff(first_s=3600, ceiling_s=3600, floor=1)
BY_TOPIC = Policies(by_topic=tuple((each.value, RetryPolicy(max_attempts=2, backoff=LATER, on_dead=each)) for each in OnDead))


def relay(engine, failing=(), verdict=TOO_LARGE):
    """Relay until nothing is pending, and let these messages fail; return the ids of what was published."""
    publisher = MemoryPublisher(lambda row: verdict if row.message_id in failing else CONFIRMED)
    transactions = Transactions(engine, DEFAULT, owner="relay", lease_s=30, batch_size=1000, policies=BY_TOPIC)
    while batch := transactions.claim():
        transactions.settle(batch, publisher.publish(batch.rows, Mock()).verdicts)
    return [row.message_id for row in publisher.published]


def make_due(engine, message_id):
    update(engine, message_id, available_at=datetime(2020, 1, 1, tzinfo=UTC))


# Which policy a topic has


def test_the_first_pattern_that_matches_decides():
    default, first, second = RetryPolicy(), RetryPolicy(max_attempts=1), RetryPolicy(max_attempts=2)
    found = Policies(default, (("orders.*", first), ("orders.#", second), ("orders.paid", default)))

    assert found.of("orders.paid") is first
    assert found.of("orders") is found.of("orders.paid.late") is second
    assert found.of("shipping.sent") is default


def test_without_patterns_every_topic_has_the_default():
    assert Policies(RetryPolicy(max_attempts=3)).of("any.topic") == RetryPolicy(max_attempts=3)


@pytest.mark.parametrize("on_dead", OnDead)
@pytest.mark.parametrize("outcome", Outcome)
def test_what_becomes_of_a_message_does_not_depend_on_what_becomes_of_its_key(outcome, on_dead):
    policy = RetryPolicy(max_age_s=60, backoff=Backoff(floor=1), on_dead=on_dead)
    usual = RetryPolicy(max_age_s=60, backoff=Backoff(floor=1))

    for age_s in (0, 60):
        arguments = {"attempts": 0, "age_s": age_s}
        ours, theirs = (decide(outcome, policy=each, **arguments) for each in (policy, usual))
        assert (ours.state, ours.attempts) == (theirs.state, theirs.attempts)


@pytest.mark.parametrize("outcome", [Outcome.REFUSED, Outcome.UNKNOWN, Outcome.UNSENT, Outcome.HELD])
def test_age_alone_kills_nothing(outcome):
    assert decide(outcome, attempts=0, age_s=1e9, policy=RetryPolicy(max_age_s=0)).state is not State.DEAD


def test_a_message_that_fails_when_it_is_too_old_is_given_up(engine, monkeypatch):
    monkeypatch.setattr("tests.unit.test_policies.BY_TOPIC", Policies(RetryPolicy(max_age_s=3600, backoff=LATER)))
    young, old = insert(engine, None, None)
    update(engine, old, created_at=datetime.now(UTC) - timedelta(hours=2))
    relay(engine, [young, old], UNROUTABLE)

    assert states(engine) == ["scheduled", "dead"]


# What a dead message leads to


def test_block_lets_the_key_wait_and_no_other(engine):
    first, _second, third, free = insert(engine, "a", "a", "b", None, topic="block")

    assert set(relay(engine, [first])) == {third, free}
    assert states(engine) == ["dead", "blocked"]
    insert(engine, "a", topic="block")
    assert relay(engine) == []
    assert states(engine) == ["dead", "blocked", "blocked"]


def test_skip_lets_the_rest_of_the_batch_go_on_in_order(engine):
    first, second, third, fourth = insert(engine, *["a"] * 4, topic="skip")

    assert relay(engine, [first, third]) == [second, fourth]
    assert states(engine) == ["dead", "dead"]
    assert relay(engine) == []


def test_skip_lets_what_was_blocked_before_go_on(engine):
    first, *rest = insert(engine, *["a"] * 4, topic="skip")
    assert relay(engine, [first], UNROUTABLE) == []
    assert states(engine) == ["scheduled", "blocked", "blocked", "blocked"], "until it is dead they wait"
    make_due(engine, first)

    assert relay(engine, [first], UNROUTABLE) == rest
    assert states(engine) == ["dead"]
    (late,) = insert(engine, "a", topic="skip")
    assert relay(engine) == [late]


def is_parked(engine, message_id, *, behind):
    row = row_of(engine, message_id)
    assert (row["state"], row["attempts"], row["error_class"]) == ("dead", 0, "Parked")
    assert row["last_error"] == f"parked behind message {behind}, which is dead"
    assert abs(row["dead_at"] - datetime.now(UTC)) < timedelta(minutes=1)
    return True


def test_park_takes_the_rest_of_the_batch_along(engine):
    sent, first, second, third, other = insert(engine, "a", "a", "a", "a", "b", topic="park")

    assert set(relay(engine, [first])) == {sent, other}
    assert row_of(engine, first)["error_class"] == "CannotSerialize"
    assert is_parked(engine, second, behind=first)
    assert is_parked(engine, third, behind=first)


def test_park_takes_along_what_was_blocked_before(engine):
    first, second, third = insert(engine, *["a"] * 3, topic="park")
    relay(engine, [first], UNROUTABLE)
    assert states(engine) == ["scheduled", "blocked", "blocked"]
    make_due(engine, first)
    relay(engine, [first], UNROUTABLE)

    assert is_parked(engine, second, behind=first)
    assert is_parked(engine, third, behind=first)


def test_park_takes_along_what_comes_later(engine):
    (first,) = insert(engine, "a", topic="park")
    relay(engine, [first])
    late, later = insert(engine, "a", "a", topic="park")

    assert relay(engine) == []
    assert is_parked(engine, late, behind=first)
    assert is_parked(engine, later, behind=first)


@pytest.mark.parametrize(("topic", "second_is"), [("block", "blocked"), ("skip", None), ("park", "dead")])
@pytest.mark.parametrize("second_topic", OnDead)
def test_the_policy_of_the_dead_message_decides_and_not_that_of_the_follower(engine, topic, second_is, second_topic):
    (first,), (second,) = insert(engine, "a", topic=topic), insert(engine, "a", topic=second_topic.value)

    assert relay(engine, [first]) == ([second] if second_is is None else [])
    assert states(engine) == ["dead"] + ([second_is] if second_is else [])


@pytest.mark.parametrize("topic", OnDead)
def test_a_dead_message_without_a_key_holds_up_nothing(engine, topic):
    first, second = insert(engine, None, None, topic=topic.value, partition=7)

    assert relay(engine, [first]) == [second]
    assert states(engine) == ["dead"]


def test_what_waits_behind_a_failure_is_not_let_go_by_what_was_sent_before_it(engine):
    head, *rest = insert(engine, *["a"] * 5, topic="block")
    relay(engine, [head], UNROUTABLE)
    make_due(engine, head)
    transactions = Transactions(engine, DEFAULT, owner="relay", lease_s=30, batch_size=1000, policies=BY_TOPIC)
    for row in rest[:2]:  # as after a settle that has let go of the first ones only
        update(engine, row, state="pending", holds=False)
    batch = transactions.claim()
    verdicts = MemoryPublisher(lambda row: UNROUTABLE if row.message_id == rest[0] else CONFIRMED).publish(batch.rows, Mock())
    transactions.settle(batch, verdicts.verdicts)

    assert states(engine) == ["scheduled", "blocked", "blocked", "blocked"]


# What is kept of it


def test_every_failure_stays_on_record_with_its_time_and_class(engine):
    (message_id,) = insert(engine, None, topic="block")
    relay(engine, [message_id], Verdict(Outcome.REFUSED, "nack", "Nack"))
    make_due(engine, message_id)
    relay(engine, [message_id], UNROUTABLE)
    make_due(engine, message_id)
    relay(engine, [message_id], Verdict(Outcome.REJECTED, None, None))

    row = row_of(engine, message_id)
    assert (row["state"], row["attempts"], row["last_error"], row["error_class"]) == ("dead", 2, "unknown", None)
    assert [(each["error"], each["error_class"]) for each in row["failures"]] == [
        ("nack", "Nack"),
        ("nowhere to go", "Unroutable"),
        ("unknown", None),
    ]
    times = [datetime.fromisoformat(each["at"]).replace(tzinfo=UTC) for each in row["failures"]]
    assert times == sorted(times)
    assert datetime.now(UTC) - times[0] < timedelta(minutes=1)


def test_only_what_failed_itself_is_counted_as_failed(engine):
    first, *_ = insert(engine, *["a"] * 4, topic="park")
    relay(engine, [first])
    with engine.begin() as connection:
        assert stats(connection, DEFAULT).failed == 1


# How the file says it


WHOLE = RetryPolicy(max_attempts=7, backoff=Backoff(first_s=2, ceiling_s=90), max_age_s=3600, on_dead=OnDead.PARK)


def test_a_table_gives_every_option():
    table = {"topics": "a.*", "max_attempts": 3, "retry_first": "5s", "retry_ceiling": "2h", "max_age": "7d", "on_dead": "skip"}
    expected = RetryPolicy(max_attempts=3, backoff=Backoff(first_s=5, ceiling_s=7200), max_age_s=604_800, on_dead=OnDead.SKIP)

    assert policies([table], WHOLE) == Policies(WHOLE, (("a.*", expected),))


def test_what_a_table_leaves_out_is_as_in_the_default():
    assert policies([{"topics": "a"}], WHOLE) == Policies(WHOLE, (("a", WHOLE),))
    assert policies([{"topics": "a"}], RetryPolicy()) == Policies(RetryPolicy(), (("a", RetryPolicy()),))
    (_, one) = policies([{"topics": "a", "retry_first": 9}], WHOLE).by_topic[0]
    assert (one.backoff, one.max_attempts, one.on_dead) == (Backoff(first_s=9, ceiling_s=90), 7, OnDead.PARK)


def test_the_tables_keep_their_order():
    found = policies([{"topics": "a.b", "max_attempts": 1}, {"topics": "#", "max_attempts": 2}], WHOLE)

    assert (found.of("a.b").max_attempts, found.of("a.c").max_attempts) == (1, 2)


URLS = 'database_url = "sqlite:///file.db"\nbroker_url = "memory://"\n'


@pytest.fixture
def run(tmp_path):
    """Run a command with a TOML file."""

    def run(text, *arguments, command="run"):
        path = tmp_path / "relay.toml"
        path.write_text(URLS + text, encoding="utf-8")
        return CliRunner().invoke(main, [command, "--config", str(path), *arguments])

    return run


def test_the_command_line_gives_the_default_that_the_tables_change(run, monkeypatch):
    module = importlib.import_module("outbox.cli.run")  # the package has a command of that name
    found = []
    monkeypatch.setattr(module, "run_relay", lambda settings, _stop, **_more: found.append(settings.policies))
    monkeypatch.setattr(module, "stop_on_signals", threading.Event)
    monkeypatch.setattr(module.logs, "setup", lambda *_, **__: None)
    text = 'max_attempts = 4\nmax_age = "1d"\n[[policies]]\ntopics = "mail.#"\non_dead = "skip"\n'
    result = run(text, "--max-attempts", "5", "--on-dead", "park")

    assert result.exit_code == 0, result.output
    (given,) = found
    assert given.default == RetryPolicy(max_attempts=5, max_age_s=86_400, on_dead=OnDead.PARK)
    assert given.of("mail.sent") == RetryPolicy(max_attempts=5, max_age_s=86_400, on_dead=OnDead.SKIP)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("policies = 3", "policies: write one [[policies]] table for each topic pattern"),
        ("[policies]\ntopics = '#'", "policies: write one [[policies]] table for each topic pattern"),
        ("[[policies]]\nmax_attempts = 3", "policies: topics is None; write a topic pattern; known are: topics, max_attempts"),
        ("[[policies]]\ntopics = 5", "policies: topics is 5; write a topic pattern"),
        ("[[policies]]\ntopics = 'a b'", "policies: topics is 'a b'; write a topic pattern"),
        ("[[policies]]\ntopic = 'a'\ntopics = '#'\nage = 1", "policies: unknown age, topic; known are: topics, max_attempts"),
        ("[[policies]]\ntopics = 'a'\nmax_attempts = 0", "policies: topics = 'a': max_attempts: 0 is not in the range"),
        ("[[policies]]\ntopics = 'a'\nmax_attempts = 'many'", "topics = 'a': max_attempts: 'many' is not a valid integer"),
        ("[[policies]]\ntopics = 'a'\nmax_attempts = 2.5", "topics = 'a': max_attempts: 2.5 is not a whole number"),
        ("[[policies]]\ntopics = 'a'\nmax_attempts = 2.0", "topics = 'a': max_attempts: 2.0 is not a whole number"),
        ("[[policies]]\ntopics = 'a'\nmax_attempts = true", "topics = 'a': max_attempts: True is not a whole number"),
        ("[[policies]]\ntopics = 'a'\nretry_first = 'soon'", "topics = 'a': retry_first: 'soon' is not a time"),
        ("[[policies]]\ntopics = 'a'\nretry_ceiling = -1", "topics = 'a': retry_ceiling: -1 is not a time"),
        ("[[policies]]\ntopics = 'a'\nmax_age = true", "topics = 'a': max_age: True is not a time"),
        ("[[policies]]\ntopics = 'a'\non_dead = 'drop'", "topics = 'a': on_dead: 'drop' is not one of 'block', 'skip', 'park'"),
        ("[[policies]]\ntopics = 'a'\non_dead = 5", "topics = 'a': on_dead: 5 is not one of"),
    ],
)
@pytest.mark.parametrize("command", ["run", "status"])
def test_a_policy_that_cannot_work_is_refused_by_every_command(run, text, problem, command):
    result = run(text, command=command)

    assert result.exit_code == USAGE
    assert problem in result.stderr
    assert "Traceback" not in result.stderr


def test_an_error_of_a_policy_is_the_librarys_own():
    with pytest.raises(ConfigurationError, match="max_attempts: -1 is not in the range"):
        policies([{"topics": "a", "max_attempts": -1}], RetryPolicy())
