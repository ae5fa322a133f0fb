"""Dead letters on SQLite, from the command line: what is selected, shown, retried and discarded."""

import json
import os
import pty
import subprocess
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path
from uuid import uuid4

import pytest
import sqlalchemy as sa
from click.testing import CliRunner
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from outbox.cli import main
from outbox.cli.exit import FAILURE, SCHEMA, USAGE
from outbox.policies import Policies
from outbox.publishers.flight import CONFIRMED
from outbox.publishers.memory import MemoryPublisher
from outbox.relay import Transactions, dead
from outbox.states import OnDead, Outcome, RetryPolicy, State, Verdict
from outbox.store import dead as store
from outbox.tables import DEFAULT
from outbox.topics import matches
from tests.rows import insert, message, row_of, states, update

ROOT = Path(__file__).parents[2]
DIED = datetime(2026, 1, 31, 8, 30, tzinfo=UTC)
FATAL = Verdict(Outcome.UNPUBLISHABLE, "too large", "TooLarge")


def bury(engine, *keys, holds=True, **values):
    """Dead letters, one for each key; their ids."""
    usual = {"state": State.DEAD, "dead_at": DIED, "attempts": 20, "last_error": "no queue", "error_class": "Unroutable"}
    return [insert(engine, key, holds=holds and key is not None, **usual | values)[0] for key in keys]


def call(engine, *arguments, code=0, **more):
    result = CliRunner().invoke(main, ["dead", *map(str, arguments), "--database-url", str(engine.url)], **more)
    assert result.exit_code == code, result.output
    return result


def listed(engine, *arguments):
    """The message ids that a list with these options shows."""
    return [json.loads(line)["message_id"] for line in call(engine, "list", "--json", *arguments).stdout.splitlines()]


def texts(message_ids):
    return [str(each) for each in message_ids]


def publish(engine, judge=lambda _row: CONFIRMED, *, on_dead=OnDead.BLOCK):
    """Claim, publish and settle until nothing is left to claim; return what was published, in order."""
    policies = Policies(RetryPolicy(on_dead=on_dead))
    transactions = Transactions(engine, DEFAULT, owner="relay", lease_s=30, batch_size=1000, policies=policies)
    publisher = MemoryPublisher(judge)
    for batch in iter(transactions.claim, None):
        transactions.settle(batch, publisher.publish(batch.rows, Always()).verdicts)
    return [row.message_id for row in publisher.published]


class Always:
    """A control that lets everything go."""

    def may_send(self):
        return True

    def progress(self):
        pass


def fails(*message_ids):
    return lambda row: FATAL if row.message_id in message_ids else CONFIRMED


# Selecting


@pytest.fixture
def letters(engine):
    """Dead letters that differ in one thing each, and messages that are not dead."""
    insert(engine, "a", None)
    insert(engine, "a", state=State.BLOCKED, holds=True)
    found = {
        "placed": bury(engine, "a"),
        "other key": bury(engine, "b"),
        "without key": bury(engine, None),
        "other topic": bury(engine, "a", topic="orders.eu.placed"),
        "other class": bury(engine, "a", error_class="TooLarge"),
        "without class": bury(engine, "a", error_class=None),
        "earlier": bury(engine, "a", dead_at=DIED - timedelta(days=1)),
        "just now": bury(engine, "a", dead_at=datetime.now(UTC)),
    }
    return {name: str(ids[0]) for name, ids in found.items()}


@pytest.mark.parametrize(
    ("options", "selected"),
    [
        ((), "all"),
        (("--key", "b"), {"other key"}),
        (("--key", "absent"), set()),
        (("--topic", "orders.eu.placed"), {"other topic"}),
        (("--topic", "orders.*.placed"), {"other topic"}),
        (("--topic", "orders.#.placed"), "all"),
        (("--topic", "#"), "all"),
        (("--topic", "orders.*"), "all but other topic"),
        (("--topic", "orders"), set()),
        (("--error-class", "TooLarge"), {"other class"}),
        (("--since", "1h"), {"just now"}),
        (("--since", "2026-01-31"), "all but earlier"),
        (("--since", "2026-01-31T08:30"), "all but earlier"),
        (("--since", "2026-01-31T09:30:00+01:00"), "all but earlier"),
        (("--since", "2026-01-31T08:30:00.001Z"), {"just now"}),
        (("--until", "2026-01-31"), {"earlier"}),
        (("--until", "2026-01-31 08:30"), "all but just now"),
        (("--until", "1h"), "all but just now"),
        (("--until", "2999-01-01"), "all"),
        (("--since", "1h", "--until", "1h"), set()),
        (("--topic", "orders.placed", "--key", "a", "--error-class", "Unroutable", "--until", "2026-01-31"), {"earlier"}),
    ],
)
def test_what_an_option_selects(engine, letters, options, selected):
    if isinstance(selected, str):
        selected = set(letters) - {selected.removeprefix("all but ")}
    assert listed(engine, *options) == [letters[name] for name in letters if name in selected]


def test_messages_are_selected_by_their_ids(engine, letters):
    two = [letters["other key"], letters["placed"]]

    assert listed(engine, *two, two[0]) == [letters["placed"], letters["other key"]]
    assert listed(engine, *two, "--key", "b") == [letters["other key"]]


_WORDS = ["orders", "eu", "placed", "a-b", "a_b"]
_TOPICS = st.lists(st.sampled_from(_WORDS), min_size=1, max_size=5).map(".".join)
_PATTERNS = st.lists(st.sampled_from([*_WORDS, "*", "#"]), min_size=1, max_size=5).map(".".join)


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(topic=_TOPICS, pattern=_PATTERNS)
def test_a_pattern_selects_in_sql_what_it_matches_elsewhere(engine, topic, pattern):
    with engine.connect() as connection, connection.begin() as transaction:
        bury(connection, None, topic=topic)
        selected = store.count(connection, DEFAULT, store.Selection(topics=pattern))
        transaction.rollback()

    assert selected == matches(pattern, topic)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (("--since", "soon"), "'soon' is not a time; write e.g. 2026-01-31, 2026-01-31T08:30, 30m, 2h, 7d (ago)"),
        (("--since", "7"), "'7' is not a time"),
        (("--since", ""), "'' is not a time"),
        (("--since", "2026-02-30"), "'2026-02-30' is not a time"),
        (("--until", "9999999d"), "'9999999d' is not a time"),
        (("--until", "0001-01-01T00:00+05:00"), "is not a time"),
        (("--since", "3y"), "'3y' is not a time"),
        (("--topic", "orders placed"), "'orders placed' is not a topic pattern; write e.g. orders.placed, orders.*, orders.#"),
        (("--limit", "0"), "0 is not in the range"),
        (("17",), "'17' is not a valid UUID"),
    ],
)
def test_an_option_that_cannot_be_meant_is_a_usage_error(engine, options, says):
    assert says in call(engine, "list", *options, code=USAGE).stderr


# Looking


def test_the_oldest_come_first_page_by_page(engine):
    buried = texts(bury(engine, *"abcde"))
    first = [json.loads(line) for line in call(engine, "list", "--json", "--limit", 2).stdout.splitlines()]
    second = listed(engine, "--limit", 2, "--after", first[-1]["id"])

    assert [each["message_id"] for each in first] + second == buried[:4]


def test_a_line_says_why_a_message_is_dead(engine):
    (message_id,) = bury(engine, "o-1", last_error="no queue\nis bound\x1b[31m")

    (line,) = call(engine, "list").stdout.splitlines()
    assert line == (
        f"       1  {message_id}  2026-01-31T08:30:00+00:00  orders.placed  key o-1  attempts 20"
        "  Unroutable: no queue\\nis bound\\x1b[31m"
    )
    found = json.loads(call(engine, "list", "--json").stdout)
    assert found["last_error"] == "no queue\nis bound\x1b[31m"
    assert (found["error_class"], found["attempts"], found["dead_at"]) == ("Unroutable", 20, DIED.isoformat())


def test_no_dead_messages_is_said_on_stderr_and_is_no_failure(engine):
    for command in ("list", "show"):
        result = call(engine, command)
        assert (result.stdout, result.stderr) == ("", "no dead messages\n")
        assert call(engine, command, "--json").output == ""


def test_a_message_is_shown_with_every_column_and_every_attempt(engine):
    (message_id,) = insert(engine, "o-1", payload='{"n": "č"}'.encode(), headers={"trace": "x"})
    publish(engine, lambda _row: Verdict(Outcome.REJECTED, "no queue", "Unroutable"))
    update(engine, message_id, available_at=DIED)
    publish(engine, fails(message_id))

    found = json.loads(call(engine, "show", message_id, "--json").stdout)
    assert set(found) == set(message.c.keys())
    assert (found["payload"], found["headers"], found["attempts"]) == ('{"n": "č"}', {"trace": "x"}, 2)
    assert [(each["error"], each["error_class"]) for each in found["failures"]] == [
        ("no queue", "Unroutable"),
        ("too large", "TooLarge"),
    ]
    now = datetime.now(UTC)
    assert all(abs(now - datetime.fromisoformat(each["at"])) < timedelta(minutes=1) for each in found["failures"])

    lines = call(engine, "show", message_id).stdout.splitlines()
    assert 'payload         {"n": "č"}' in lines
    place = next(number for number, line in enumerate(lines) if line.startswith("failures "))
    first, second = found["failures"]
    assert lines[place] == f"failures        {first['at']}  Unroutable  no queue"
    assert lines[place + 1] == f"{'':15} {second['at']}  TooLarge  too large"


def test_several_are_shown_with_a_line_between(engine):
    bury(engine, "a", payload=b"\xff\x00")
    bury(engine, "b")
    first, second = call(engine, "show", "--key", "a").stdout, call(engine, "show", "--key", "b").stdout

    assert "payload         base64:/wA=\n" in first
    assert "failures        none\n" in first
    assert call(engine, "show").stdout == f"{first}\n{second}"


@pytest.mark.parametrize("command", [["show"], ["retry", "--yes"], ["retry", "--dry-run"], ["discard", "--yes"]])
def test_a_message_that_is_named_and_not_dead_is_a_failure_that_changes_nothing(engine, command):
    dead_id, alive, absent = bury(engine, "a")[0], insert(engine, "b")[0], uuid4()
    result = call(engine, *command, dead_id, alive, absent, code=FAILURE)

    assert result.stdout == ""
    assert f"Error: no dead letter {alive}, {absent}: it is not dead, or was retried or discarded" in result.stderr
    assert states(engine) == ["dead", "pending"]


def test_without_tables_it_says_what_to_run(tmp_path):
    engine = sa.create_engine(f"sqlite:///{tmp_path / 'empty.db'}")
    assert "run: outbox-relay schema verify" in call(engine, "retry", "--all", "--yes", code=SCHEMA).stderr


# Asking


@pytest.mark.parametrize("command", ["retry", "discard"])
def test_nothing_is_changed_without_a_selection_or_all(engine, command):
    bury(engine, "a")

    assert f"say which messages to {command}, or --all" in call(engine, command, "--yes", code=USAGE).stderr
    assert "not both" in call(engine, command, "--all", "--key", "a", "--yes", code=USAGE).stderr
    assert states(engine) == ["dead"]


@pytest.mark.parametrize("command", ["retry", "discard"])
def test_nothing_is_changed_when_there_is_nobody_to_ask(engine, command):
    bury(engine, "a")
    result = call(engine, command, "--all", code=USAGE, input="y\n")

    assert "there is no terminal to ask at" in result.stderr
    assert "--yes" in result.stderr
    assert states(engine) == ["dead"]


@pytest.mark.parametrize("command", ["retry", "discard"])
def test_a_dry_run_says_what_it_would_do_and_changes_nothing(engine, command):
    buried = bury(engine, *"abcdefg")
    before = [row_of(engine, each) for each in buried]

    first, *lines, last = call(engine, command, "--all", "--dry-run").stdout.splitlines()
    assert (first, last) == (f"would {command} 7 messages", "and 2 more")
    assert lines == call(engine, "list", "--limit", 5).stdout.splitlines()
    found = json.loads(call(engine, command, "--key", "c", "--dry-run", "--json").stdout)
    assert (found[f"would_{command}"], [each["key"] for each in found["first"]]) == (1, ["c"])
    assert [row_of(engine, each) for each in buried] == before


def at_a_terminal(engine, *arguments, answer):
    """Run the command in a process whose stdin and stderr are a terminal; return its code, stdout and stderr."""
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "outbox", "dead", *arguments, "--database-url", str(engine.url)]
    with subprocess.Popen(
        command, stdin=theirs, stderr=theirs, stdout=subprocess.PIPE, text=True, env=os.environ | {"PYTHONPATH": str(ROOT)}
    ) as process:
        os.close(theirs)
        os.write(ours, answer.encode())
        shown = b""
        try:
            while part := os.read(ours, 4096):
                shown += part
        except OSError:  # the other end was closed
            pass
        os.close(ours)
        stdout = process.stdout.read()
        return process.wait(60), stdout, shown.decode()


def bury_many(engine, number, **values):
    usual = {"topic": "t", "type": "t", "content_type": "c", "payload": b"", "partition": 0, "state": "dead", "dead_at": DIED}
    with engine.begin() as connection:
        connection.execute(message.insert(), [{"message_id": uuid4(), **usual, **values} for _ in range(number)])


def test_at_a_terminal_it_asks_and_shows_its_progress(engine):
    bury_many(engine, 1234)
    code, stdout, stderr = at_a_terminal(engine, "retry", "--all", answer="n\n")
    assert (code, stdout) == (FAILURE, "")
    assert "retry 1,234 messages? [y/N]" in stderr
    assert set(states(engine)) == {"dead"}

    code, stdout, stderr = at_a_terminal(engine, "retry", "--all", answer="y\n")
    assert (code, stdout) == (0, "retried 1,234 messages\n")
    assert "500/1234" in stderr
    assert "1234/1234" in stderr
    assert set(states(engine)) == {"pending"}


def test_a_few_need_no_progress_bar(engine):
    bury(engine, *"ab")
    _code, stdout, stderr = at_a_terminal(engine, "discard", "--all", "--yes", answer="")

    assert (stdout, stderr) == ("discarded 2 messages\n", "")


def test_what_was_done_before_a_failure_is_said(engine, monkeypatch):
    bury_many(engine, 1234)
    real, calls = store.retry, iter(range(9))

    def fail(*arguments):
        if next(calls) == 2:
            raise KeyboardInterrupt
        return real(*arguments)

    monkeypatch.setattr(store, "retry", fail)
    result = call(engine, "retry", "--all", "--yes", code=FAILURE)
    assert "retried 1,000 messages before this" in result.stderr
    assert states(engine).count("pending") == 1000


# Retrying


def test_a_retried_message_keeps_its_id_key_and_place_and_starts_afresh(engine):
    first, second = insert(engine, "a", "a")
    publish(engine, fails(first))
    before = row_of(engine, first)
    assert states(engine) == ["dead", "blocked"]

    assert call(engine, "retry", first, "--yes").stdout == "retried 1 message\n"
    after = row_of(engine, first)
    changed = {name for name in after if after[name] != before[name]}
    assert changed == {"state", "attempts", "available_at", "dead_at", "holds", "again", "last_error", "error_class"}
    assert (after["state"], after["attempts"], after["dead_at"], after["holds"]) == ("pending", 0, None, False)
    assert (after["last_error"], after["error_class"], len(after["failures"])) == (None, None, 1)
    assert abs(after["available_at"] - datetime.now(UTC)) < timedelta(minutes=1)
    assert publish(engine) == [first, second]
    assert states(engine) == []


def test_attempts_of_all_lives_stay_on_record(engine):
    (message_id,) = insert(engine, "a")
    for _ in range(3):
        publish(engine, fails(message_id))
        call(engine, "retry", message_id, "--yes")

    assert [each["error_class"] for each in row_of(engine, message_id)["failures"]] == ["TooLarge"] * 3


def test_followers_come_after_the_first_and_before_what_is_new(engine):
    inserted = insert(engine, *["a"] * 4)
    publish(engine, fails(inserted[0]))
    call(engine, "retry", "--all", "--yes")
    inserted += insert(engine, "a")

    assert publish(engine) == inserted


def test_parked_messages_are_retried_with_the_first_in_order(engine):
    inserted = insert(engine, *["a"] * 4)
    publish(engine, fails(inserted[0]), on_dead=OnDead.PARK)
    assert states(engine) == ["dead"] * 4
    assert listed(engine, "--error-class", "Parked") == texts(inserted[1:])

    assert call(engine, "retry", "--key", "a", "--yes", "--json").stdout == '{"retried": 4}\n'
    assert publish(engine, on_dead=OnDead.PARK) == inserted


def test_parked_messages_that_are_retried_without_the_first_are_parked_again(engine):
    inserted = insert(engine, *["a"] * 3)
    publish(engine, fails(inserted[0]), on_dead=OnDead.PARK)
    call(engine, "retry", "--error-class", "Parked", "--yes")
    assert states(engine) == ["dead", "pending", "pending"]

    assert publish(engine, on_dead=OnDead.PARK) == []
    assert states(engine) == ["dead"] * 3
    call(engine, "retry", "--all", "--yes")
    assert publish(engine) == inserted


@pytest.mark.parametrize("release", ["retry", "discard"])
def test_a_retried_message_waits_for_an_earlier_one_of_its_key_that_is_still_dead(engine, release):
    first, second = bury(engine, "a", "a")
    third, other = insert(engine, "a", "b")
    call(engine, "retry", second, "--yes")
    assert publish(engine) == [other]
    assert states(engine) == ["dead", "blocked", "blocked"]

    call(engine, release, first, "--yes")
    assert publish(engine) == [*([first] if release == "retry" else []), second, third]
    assert states(engine) == []


def test_a_retried_message_that_dies_again_holds_back_its_key_again(engine):
    first, second = insert(engine, "a", "a")
    publish(engine, fails(first))
    call(engine, "retry", "--all", "--yes")

    assert publish(engine, fails(first)) == []
    assert states(engine) == ["dead", "blocked"]
    call(engine, "retry", "--all", "--yes")
    assert publish(engine) == [first, second]


# Discarding


def test_what_is_blocked_behind_a_discarded_message_goes_on(engine):
    first, *others = insert(engine, *["a"] * 4)
    publish(engine, fails(first))

    assert call(engine, "discard", first, "--yes").stdout == "discarded 1 message\n"
    assert publish(engine) == others
    assert states(engine) == []


@pytest.mark.parametrize("earlier", [State.DEAD, State.SCHEDULED])
def test_what_is_blocked_waits_on_if_another_message_of_the_key_holds_it_back(engine, earlier):
    (first,) = bury(engine, "a")
    second, third = bury(engine, "a", "a")
    if earlier is State.SCHEDULED:
        later = datetime.now(UTC) + timedelta(days=1)
        update(engine, first, state="scheduled", dead_at=None, available_at=later)
    insert(engine, "a", state=State.BLOCKED, holds=True)
    call(engine, "discard", second, third, "--yes")

    assert states(engine) == [earlier, "blocked"]


def test_more_than_are_let_go_at_once_go_on_to_the_end_in_order(engine):
    (first,) = bury(engine, "a")
    with engine.begin() as connection:
        followers = insert(connection, *["a"] * 2500, state=State.BLOCKED, holds=True)
    call(engine, "discard", first, "--yes")
    assert states(engine).count("pending") == 1000

    assert publish(engine) == followers


def test_a_message_that_held_nothing_back_is_discarded_without_touching_its_key(engine):
    (first,) = bury(engine, "a", holds=False)
    insert(engine, "a", state=State.BLOCKED, holds=True)
    call(engine, "discard", first, "--yes")

    assert states(engine) == ["blocked"]


# Batches


@pytest.mark.parametrize("change", [dead.retry, dead.discard])
def test_a_run_is_batches_of_five_hundred_in_id_order(engine, change):
    bury_many(engine, 1200)
    with engine.connect() as connection:
        batches = change(connection, DEFAULT, store.Selection())
        assert next(batches) == 500
        assert not connection.in_transaction()
        assert [state == "dead" for state in states(engine)][-700:] == [True] * 700
        assert list(batches) == [500, 200]


def test_what_dies_after_the_question_is_left_alone(engine):
    bury_many(engine, 501)
    with engine.connect() as connection:
        with connection.begin():
            asked_at = store.clock(connection)
        batches = dead.discard(connection, DEFAULT, store.Selection(until=asked_at))
        assert next(batches) == 500
        bury_many(engine, 1, dead_at=asked_at + timedelta(milliseconds=1))
        assert list(batches) == [1]

    assert states(engine) == ["dead"]


def test_each_message_is_retried_once_also_if_it_dies_again_at_once(engine):
    bury_many(engine, 501)
    with engine.connect() as connection:
        batches = dead.retry(connection, DEFAULT, store.Selection())
        assert next(batches) == 500
        publish(engine, lambda _row: FATAL)
        assert list(batches) == [1]

    assert states(engine) == ["dead"] * 500 + ["pending"]
