"""What a consumer has given up, on SQLite, from the command line: listed, shown, retried and discarded, in the order of its keys."""

import json
import sqlite3
from datetime import UTC, datetime, timedelta

import pytest
import sqlalchemy as sa

from outbox.backoff import Backoff
from outbox.cli.exit import FAILURE, SCHEMA, USAGE
from outbox.inbox import dead
from outbox.inbox.dead import FailedLetters
from outbox.inbox.processing import processing
from outbox.states import OnDead, RetryPolicy
from outbox.store.dead import Selection
from tests.consumers import DIED, Shop, call, claim_and_receive, failed, shop_at

INBOX = "shop:inbox"


@pytest.fixture
def shop(tmp_path, monkeypatch):
    with shop_at(f"sqlite:///{tmp_path}/shop.db", monkeypatch) as shop:
        yield shop


@pytest.fixture
def ordered(tmp_path, monkeypatch):
    with shop_at(f"sqlite:///{tmp_path}/shop.db", monkeypatch, ordered=True) as shop:
        yield shop


@pytest.fixture
def skipping(tmp_path, monkeypatch):
    with shop_at(f"sqlite:///{tmp_path}/shop.db", monkeypatch, ordered=True, on_dead=OnDead.SKIP) as shop:
        yield shop


def listed(*arguments):
    return [json.loads(line)["message_id"] for line in call("dead", "list", INBOX, "--json", *arguments).stdout.splitlines()]


# Looking


@pytest.fixture
def letters(shop):
    """Dead messages that differ in one thing each, and others."""
    shop.bury(1, prefix="usual", key="a")
    shop.bury(1, prefix="key", key="b")
    shop.bury(1, prefix="topic", key="a", topic="orders.eu.placed")
    shop.bury(1, prefix="class", key="a", error_class="TooLate")
    shop.bury(1, prefix="early", key="a", dead_at=DIED - timedelta(days=1))
    shop.bury(1, prefix="other", key="a", consumer="billing")
    shop.bury(1, prefix="waits", key="a", state="retry", dead_at=None)
    return shop


@pytest.mark.parametrize(
    ("options", "selected"),
    [
        ((), "usual key topic class early"),
        (("--key", "b"), "key"),
        (("--topic", "orders.*"), "usual key class early"),
        (("--topic", "orders.*.placed"), "topic"),
        (("--error-class", "TooLate"), "class"),
        (("--until", "2026-01-31"), "early"),
        (("--since", "2026-01-31"), "usual key topic class"),
        (("--since", "1h"), ""),
        (("usual-0", "key-0"), "usual key"),
        (("usual-0", "key-0", "--key", "b"), "key"),
        (("--limit", "2"), "usual key"),
        (("--after", "2", "--limit", "2"), "topic class"),
    ],
)
def test_what_an_option_selects(letters, options, selected):
    assert listed(*options) == [f"{name}-0" for name in selected.split()]


@pytest.mark.parametrize("command", [["show"], ["retry", "--yes"], ["discard", "--yes"]])
def test_what_is_named_and_not_dead_or_of_another_consumer_is_a_failure_that_changes_nothing(letters, command):
    before = letters.rows()
    result = call("dead", command[0], INBOX, *command[1:], "usual-0", "other-0", "waits-0", "absent", code=FAILURE)

    assert "no dead letter other-0, waits-0, absent: it is not dead" in result.stderr
    assert letters.rows() == before


def test_a_line_says_why_a_message_is_dead_and_hides_what_would_move_the_cursor(shop):
    shop.bury(1, key="o\t1", last_error="no\x1b[31m", prefix="id\x1b")

    (line,) = call("dead", "list", INBOX).stdout.splitlines()
    assert line == ("       1  id\\x1b-0  2026-01-31T08:30:00+00:00  orders.placed  key o\\t1  attempts 20  Refused: no\\x1b[31m")


def test_a_message_is_shown_with_every_column_and_every_try(shop):
    shop.broken = {"m-1"}
    shop.deliver("m-1", key="a")
    call("dead", "retry", INBOX, "m-1", "--yes")
    shop.work()

    found = json.loads(call("dead", "show", INBOX, "m-1", "--json").stdout)
    assert set(found) == set(failed.c.keys())
    assert (found["payload"], found["attempts"], found["state"]) == ('{"n": 1}', 1, "dead")
    assert [(each["error"], each["error_class"]) for each in found["failures"]] == [("not m-1", "Refused")] * 2
    assert all(abs(datetime.now(UTC) - datetime.fromisoformat(each["at"])) < timedelta(minutes=1) for each in found["failures"])
    assert 'payload         {"n": 1}\n' in call("dead", "show", INBOX).stdout


def test_none_dead_is_said_on_stderr_and_is_no_failure(shop):
    result = call("dead", "list", INBOX)
    assert (result.stdout, result.stderr) == ("", "no dead messages\n")


# Asking


@pytest.mark.parametrize("command", ["retry", "discard"])
def test_nothing_is_changed_by_mistake(shop, command):
    shop.bury(7)
    before = shop.rows()

    assert f"say which messages to {command}, or --all" in call("dead", command, INBOX, "--yes", code=USAGE).stderr
    assert "no terminal to ask at" in call("dead", command, INBOX, "--all", code=USAGE, input="y\n").stderr
    first, *lines, last = call("dead", command, INBOX, "--all", "--dry-run").stdout.splitlines()
    assert (first, last) == (f"would {command} 7 messages", "and 2 more")
    assert lines == call("dead", "list", INBOX, "--limit", 5).stdout.splitlines()
    assert shop.rows() == before


def test_without_tables_it_says_what_to_run(shop):
    failed.drop(shop.engine)
    assert "run: outbox-relay schema verify" in call("dead", "retry", INBOX, "--all", "--yes", code=SCHEMA).stderr


# Changing


@pytest.mark.parametrize("is_async", [False, True])
def test_a_retried_message_starts_afresh_and_has_its_effect_once(tmp_path, monkeypatch, is_async):
    with shop_at(f"sqlite:///{tmp_path}/shop.db", monkeypatch, is_async=is_async) as shop:
        shop.broken = {"bad"}
        shop.deliver("good", "bad", key="a")
        before = shop.row("bad")
        assert call("dead", "retry", INBOX, "bad", "--yes", "--json").stdout == '{"retried": 1}\n'
        after = shop.row("bad")

        changed = {name for name in after if after[name] != before[name]}
        assert changed == {"state", "attempts", "available_at", "dead_at", "last_error", "error_class"}
        assert (after["state"], after["attempts"], len(after["failures"])) == ("retry", 0, 1)
        shop.broken.clear()
        shop.work()
        shop.work()
        assert shop.handled() == ["good", "bad"]
        assert shop.failed() == {}


@pytest.mark.parametrize("is_async", [False, True])
def test_a_discarded_message_is_gone_and_other_consumers_keep_theirs(tmp_path, monkeypatch, is_async):
    with shop_at(f"sqlite:///{tmp_path}/shop.db", monkeypatch, is_async=is_async) as shop:
        shop.bury(3)
        shop.bury(3, consumer="billing", prefix="theirs")
        assert call("dead", "discard", INBOX, "--all", "--yes").stdout == "discarded 3 messages\n"

        assert list(shop.failed()) == ["theirs-0", "theirs-1", "theirs-2"]


@pytest.mark.parametrize("change", ["retry", "discard"])
def test_a_run_is_batches_of_five_hundred_in_id_order_each_in_its_own_transaction(shop, change):
    shop.bury(1200, keys=7)
    with processing(shop.inbox) as run:
        batches = getattr(FailedLetters(shop.inbox, run), change)(Selection())
        assert next(batches) == 500
        assert list(shop.failed().values())[-700:] == ["dead"] * 700
        assert list(batches) == [500, 200]


def test_what_dies_again_or_dies_meanwhile_is_left_alone(shop, monkeypatch):
    monkeypatch.setattr(dead, "AT_ONCE", 5)
    shop.bury(6)
    shop.broken = {f"m-{n}" for n in range(6)}
    with processing(shop.inbox) as run:
        letters = FailedLetters(shop.inbox, run)
        batches = letters.retry(Selection(until=letters.clock()))
        assert next(batches) == 5
        while claim_and_receive(run, shop.inbox, 100):
            pass
        shop.bury(1, prefix="later", dead_at=datetime.now(UTC) + timedelta(hours=1))
        assert list(batches) == [1]
    assert sorted(shop.failed().values()) == ["dead"] * 6 + ["retry"]


def test_a_batch_takes_the_write_lock_first_also_if_the_application_reads_before_it_writes(shop):
    """SQLite refuses it to a transaction that has read what others have changed since."""

    @sa.event.listens_for(shop.engine, "begin")
    def begin(connection):
        connection.exec_driver_sql("ROLLBACK")
        connection.exec_driver_sql("BEGIN DEFERRED")

    statements = []
    sa.event.listen(shop.engine, "before_cursor_execute", lambda *arguments: statements.append(arguments[2]))
    shop.bury(2)
    statements.clear()
    with processing(shop.inbox) as run:
        assert list(FailedLetters(shop.inbox, run).discard(Selection())) == [2]
    assert [text.split()[0] for text in statements if not text.startswith(("BEGIN", "ROLLBACK"))][:2] == ["UPDATE", "SELECT"]
    other = sqlite3.connect(shop.engine.url.database)
    assert other.execute("SELECT count(*) FROM failed_messages").fetchone() == (0,)
    other.close()


# The order of a key


def test_what_waits_behind_a_dead_message_follows_when_it_is_retried(ordered):
    ordered.broken = {"1"}
    ordered.deliver("1", "2", "3", key="a")
    ordered.deliver("other", key="b")
    assert ordered.failed() == {"1": "dead", "2": "blocked", "3": "blocked"}
    ordered.broken.clear()
    call("dead", "retry", INBOX, "1", "--yes")
    assert ordered.failed() == {"1": "retry", "2": "blocked", "3": "blocked"}

    ordered.deliver("4", key="a")
    ordered.work()
    assert ordered.handled() == ["other", "1", "2", "3", "4"]
    assert ordered.failed() == {}


def test_what_waits_behind_a_dead_message_goes_on_when_it_is_discarded(ordered):
    ordered.broken = {"1"}
    ordered.deliver("1", "2", "3", key="a")
    call("dead", "discard", INBOX, "1", "--yes")
    assert ordered.failed() == {"2": "retry", "3": "blocked"}

    ordered.work()
    assert ordered.handled() == ["2", "3"]


@pytest.mark.parametrize("release", ["retry", "discard"])
def test_a_retried_message_does_not_overtake_an_earlier_one_that_is_still_dead(ordered, release):
    ordered.bury(2, key="a")
    ordered.deliver("3", key="a")
    call("dead", "retry", INBOX, "m-1", "--yes")
    ordered.work()
    assert ordered.handled() == []
    assert ordered.failed() == {"m-0": "dead", "m-1": "blocked", "3": "blocked"}

    call("dead", release, INBOX, "m-0", "--yes")
    ordered.work()
    assert ordered.handled() == [*(["m-0"] if release == "retry" else []), "m-1", "3"]


def test_what_waits_does_not_overtake_one_that_stays_dead_when_an_earlier_one_is_done(ordered):
    ordered.bury(2, key="a")
    ordered.deliver("3", key="a")
    call("dead", "retry", INBOX, "m-0", "--yes")
    ordered.work()
    assert ordered.handled() == ["m-0"]
    assert ordered.failed() == {"m-1": "dead", "3": "blocked"}


def test_what_waits_does_not_overtake_one_that_stays_dead_when_a_later_one_is_discarded(ordered):
    ordered.bury(2, key="a")
    ordered.deliver("3", key="a")
    call("dead", "discard", INBOX, "m-1", "--yes")
    assert ordered.failed() == {"m-0": "dead", "3": "blocked"}


def test_many_of_a_key_that_are_retried_at_once_keep_their_order(ordered, monkeypatch):
    monkeypatch.setattr(dead, "AT_ONCE", 5)
    ordered.bury(24, keys=3)
    call("dead", "retry", INBOX, "--all", "--yes")
    assert sorted(ordered.failed().values()) == ["blocked"] * 21 + ["retry"] * 3

    ordered.work()
    handled = [int(each.removeprefix("m-")) for each in ordered.handled()]
    assert len(handled) == 24
    assert all(one == sorted(one) for key in range(3) if (one := [n for n in handled if n % 3 == key]))


def test_a_message_that_dies_unhandled_lets_nothing_overtake_an_earlier_dead_one(ordered):
    ordered.broken = {"1"}
    ordered.deliver("1", "2", "", key="a")
    assert list(ordered.failed().values()) == ["dead", "blocked", "dead"]


def test_where_dead_messages_are_skipped_a_retried_one_waits_for_the_one_that_is_being_tried(skipping):
    skipping.broken = {"1"}
    skipping.deliver("1", "2", key="a")
    skipping.bury(1, prefix="tried", key="a", state="retry", dead_at=None, attempts=0)
    call("dead", "retry", INBOX, "1", "--yes")
    assert skipping.failed() == {"1": "blocked", "tried-0": "retry"}

    skipping.broken.clear()
    skipping.work()
    assert skipping.handled() == ["2", "tried-0", "1"]


def test_where_dead_messages_are_skipped_one_that_is_retried_does_not_wait_for_them(skipping):
    skipping.broken = {"1", "2"}
    skipping.deliver("1", "2", key="a")
    skipping.broken.clear()
    call("dead", "retry", INBOX, "2", "--yes")
    skipping.work()
    assert skipping.handled() == ["2"]
    assert skipping.failed() == {"1": "dead"}


def test_what_has_waited_goes_on_although_the_inbox_is_not_ordered_any_more(tmp_path, monkeypatch):
    url = f"sqlite:///{tmp_path}/shop.db"
    before = Shop(url, ordered=True)
    before.broken = {"1"}
    before.deliver("1", "2", "3", key="a")
    before.close()
    with shop_at(url, monkeypatch) as shop:
        call("dead", "discard", INBOX, "1", "--yes")
        shop.work()
        assert shop.handled() == ["2", "3"]


def test_topics_of_one_key_wait_for_dead_ones_each_as_its_own_policy_says(ordered):
    """What is retried and has come to its end does not let a message of a blocking topic overtake a dead one."""
    hurried = RetryPolicy(max_attempts=2, backoff=Backoff(first_s=0, ceiling_s=0), on_dead=OnDead.SKIP)
    ordered.inbox.transactional("hints.#", retry=hurried)(ordered._handle)
    ordered.broken = {"1", "hint"}
    ordered.deliver("1", key="a")
    ordered.deliver("hint", key="a", topic="hints.given")
    ordered.deliver("2", key="a")
    assert ordered.failed() == {"1": "dead", "hint": "retry", "2": "blocked"}

    ordered.broken.clear()
    ordered.work()
    assert ordered.handled() == ["hint"]
    assert ordered.failed() == {"1": "dead", "2": "blocked"}
