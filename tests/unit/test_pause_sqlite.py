"""Pausing topics and resuming them: what goes out, what waits, and that a key is never reordered."""

import json
import random
import threading

import pytest
import sqlalchemy as sa
from click.testing import CliRunner
from sqlalchemy import event

from outbox.backoff import Backoff
from outbox.cli import main
from outbox.policies import Policies
from outbox.publishers.flight import CONFIRMED, Flight
from outbox.publishers.memory import MemoryPublisher
from outbox.relay import Relay, Transactions, resuming
from outbox.relay.resuming import Resume
from outbox.relay.stopping import Stopping
from outbox.states import OnDead, Outcome, RetryPolicy, State, Verdict
from outbox.store import pauses
from outbox.tables import DEFAULT
from tests.rows import insert, message, state_of, states, update

PLACED, PAID, OTHER = "orders.placed", "orders.paid", "stock.moved"
REJECTED = Verdict(Outcome.REJECTED, "unroutable")
DEADLY = Verdict(Outcome.UNPUBLISHABLE, "too large")


def relay(engine, *, batch_size=1000, on_dead=OnDead.BLOCK, first_s=3600):
    policy = RetryPolicy(max_attempts=10_000, backoff=Backoff(first_s=first_s, ceiling_s=first_s, floor=1), on_dead=on_dead)
    return Transactions(engine, DEFAULT, owner="relay", lease_s=30, batch_size=batch_size, policies=Policies(policy))


def deliver(batch, judge=lambda _row: CONFIRMED):
    """Publish a batch as a publisher does: after one of a key has failed, the rest of the key is held."""
    flight, published = Flight(batch.rows), []
    while flight.waiting:
        row = flight.sent()
        verdict = judge(row)
        if verdict is CONFIRMED:
            published.append(row.message_id)
        flight.answered(row, verdict)
    return flight.end(), published


def drain(engine, transactions=None, judge=lambda _row: CONFIRMED):
    """Claim and settle until nothing is deliverable; return what was published, in order."""
    transactions, published = transactions or relay(engine), []
    for batch in iter(transactions.claim, None):
        verdicts, sent = deliver(batch, judge)
        published += sent
        transactions.settle(batch, verdicts)
    return published


def pause(engine, topics):
    with engine.begin() as connection:
        return pauses.add(connection, DEFAULT, topics)


def resume(engine, topics):
    resumption = Resume(engine, DEFAULT, topics)
    assert resumption.begin()
    number = sum(resumption.steps())
    assert resumption.finish()
    return number


def all_states(engine, *message_ids):
    return [state_of(engine, message_id).value for message_id in message_ids]


def test_a_paused_topic_is_not_published_and_others_go_on(engine):
    placed = insert(engine, "a", None, topic=PLACED)
    others = insert(engine, "b", None, topic=OTHER)
    pause(engine, "orders.*")

    assert sorted(drain(engine)) == sorted(others)
    assert states(engine) == ["blocked", "blocked"]
    assert resume(engine, "orders.*") == 2
    assert sorted(drain(engine)) == sorted(placed)
    assert states(engine) == []


def test_later_messages_of_a_key_wait_behind_a_paused_one_in_whatever_topic(engine):
    (first,) = insert(engine, "a", topic=OTHER)
    (paused,) = insert(engine, "a", topic=PLACED)
    (later,) = insert(engine, "a", topic=OTHER)
    pause(engine, PLACED)
    assert drain(engine) == [first]
    (latest,) = insert(engine, "a", topic=OTHER)
    assert drain(engine) == []
    assert states(engine) == ["blocked"] * 3

    resume(engine, PLACED)
    assert drain(engine) == [paused, later, latest]


def test_a_key_keeps_its_order_when_each_claim_sees_one_message_of_it(engine):
    inserted = [insert(engine, "a", topic=topic)[0] for topic in (OTHER, PLACED, OTHER, PAID, OTHER, PLACED)]
    pause(engine, "orders.*")
    assert drain(engine, relay(engine, batch_size=1)) == inserted[:1]
    resume(engine, "orders.*")

    assert drain(engine, relay(engine, batch_size=1)) == inserted[1:]


def test_what_waits_behind_a_dead_message_still_waits_after_a_resume(engine):
    head, behind = insert(engine, "a", "a", topic=PLACED)
    drain(engine, judge=lambda _row: DEADLY)
    (paused,) = insert(engine, "b", topic=PLACED)
    pause(engine, PLACED)
    drain(engine)
    resume(engine, PLACED)

    assert drain(engine) == [paused]
    assert all_states(engine, head, behind) == ["dead", "blocked"]


def test_a_message_that_two_pauses_match_waits_for_both(engine):
    (placed,) = insert(engine, None, topic=PLACED)
    (paid,) = insert(engine, None, topic=PAID)
    pause(engine, "orders.*")
    pause(engine, PLACED)
    drain(engine)
    resume(engine, "orders.*")
    assert drain(engine) == [paid]
    assert state_of(engine, placed) is State.BLOCKED

    resume(engine, PLACED)
    assert drain(engine) == [placed]


def test_a_message_that_is_backing_off_waits_too_when_it_is_due(engine):
    first, second = insert(engine, "a", "a", topic=PLACED)
    drain(engine, judge=lambda _row: REJECTED)
    pause(engine, PLACED)
    update(engine, first, available_at=sa.func.datetime("now", "-1 hour"))
    assert drain(engine) == []
    assert all_states(engine, first, second) == ["blocked", "blocked"]

    resume(engine, PLACED)
    assert drain(engine) == [first, second]


def test_a_paused_message_is_not_parked_behind_a_later_one_that_is_dead(engine):
    (delayed,) = insert(engine, "a", topic=PLACED, state=State.SCHEDULED, available_at=sa.func.datetime("now", "+1 hour"))
    (dead,) = insert(engine, "a", topic=OTHER)
    transactions = relay(engine, on_dead=OnDead.PARK)
    drain(engine, transactions, judge=lambda _row: DEADLY)
    pause(engine, PLACED)
    update(engine, delayed, available_at=sa.func.datetime("now", "-1 hour"))
    drain(engine, transactions)

    assert all_states(engine, delayed, dead) == ["blocked", "dead"]


def test_a_pause_is_there_once_and_only_what_is_there_can_be_resumed(engine):
    assert pause(engine, "orders.*")
    assert not pause(engine, "orders.*")
    assert not Resume(engine, DEFAULT, PLACED).begin()


@pytest.mark.parametrize("steps", [0, 1, 2, 3])
def test_a_resume_that_was_killed_is_finished_by_a_second_one(engine, monkeypatch, steps):
    monkeypatch.setattr(resuming, "BATCH", 2)
    inserted = insert(engine, "a", "a", "b", None, "a", topic=PLACED)
    pause(engine, "orders.*")
    drain(engine)
    killed = Resume(engine, DEFAULT, "orders.*")
    killed.begin()
    going = killed.steps()
    for _ in range(steps):
        next(going)
    with engine.begin() as connection:
        assert [each.resuming for each in pauses.listed(connection, DEFAULT)] == [True]
    published = drain(engine)
    late = insert(engine, "a", topic=PLACED)
    published += drain(engine)

    resume(engine, "orders.*")
    published += drain(engine)
    assert sorted(published) == sorted(inserted + late)
    of_a = [*inserted[:2], inserted[4], *late]
    assert [each for each in published if each in of_a] == of_a
    with engine.begin() as connection:
        assert pauses.listed(connection, DEFAULT) == []


def test_what_is_paused_again_during_a_resume_stays_paused(engine, monkeypatch):
    monkeypatch.setattr(resuming, "BATCH", 2)
    insert(engine, "a", "b", "c", topic=PLACED)
    pause(engine, PLACED)
    drain(engine)
    resumption = Resume(engine, DEFAULT, PLACED)
    resumption.begin()
    going = resumption.steps()
    next(going)
    assert pause(engine, PLACED)
    assert drain(engine) == []
    list(going)

    assert not resumption.finish()
    assert drain(engine) == []
    assert states(engine) == ["blocked"] * 3


class Chaos:
    """Enqueues, relays, pauses, resumes and kills resumes as the dice fall."""

    def __init__(self, engine, seed):
        self.engine, self.dice = engine, random.Random(seed)
        self.transactions = relay(engine, batch_size=self.dice.choice([1, 20, 200]), first_s=0)
        self.of_key, self.published, self.going = {}, [], {}

    def step(self):
        self.dice.choices([self.enqueue, self.relay, self.pause, self.resume], [2, 6, 1, 3])[0]()

    def enqueue(self):
        for key in self.dice.choices(["a", "b", "c", None], k=self.dice.randint(1, 6)):
            (new,) = insert(self.engine, key, topic=self.dice.choice([PLACED, PAID, OTHER]))
            self.of_key[new] = key

    def relay(self):
        batch = self.transactions.claim()
        if batch is not None:
            verdicts, sent = deliver(batch, lambda _row: self.dice.choices([CONFIRMED, REJECTED], [5, 1])[0])
            self.published += sent
            self.transactions.settle(batch, verdicts)

    def pattern(self):
        return self.dice.choice(["orders.*", PLACED, "stock.#", "#"])

    def pause(self):
        pause(self.engine, self.pattern())

    def resume(self):
        topics = self.pattern()
        if topics not in self.going:
            resumption = Resume(self.engine, DEFAULT, topics)
            if not resumption.begin():
                return
            self.going[topics] = (resumption, resumption.steps())
        resumption, steps = self.going[topics]
        if next(steps, None) is None:
            del self.going[topics]
            resumption.finish()
        elif self.dice.random() < 0.2:
            del self.going[topics]  # killed


@pytest.mark.parametrize("seed", range(8))
def test_order_holds_and_nothing_is_left_behind_whatever_happens_in_between(engine, monkeypatch, seed):
    monkeypatch.setattr(resuming, "BATCH", 3)
    chaos = Chaos(engine, seed)
    for _ in range(100):
        chaos.step()
    with engine.begin() as connection:
        left = [each.topics for each in pauses.listed(connection, DEFAULT)]
    for topics in left:
        resume(engine, topics)
    while states(engine):
        chaos.relay()

    assert sorted(chaos.published) == sorted(chaos.of_key)
    for key in ("a", "b", "c"):
        enqueued = [each for each, its in chaos.of_key.items() if its == key]
        assert [each for each in chaos.published if chaos.of_key[each] == key] == enqueued


# What it costs


class Statements:
    """The statements that an engine executes from now on."""

    def __init__(self, engine):
        self.all = []
        event.listen(engine, "before_cursor_execute", lambda *arguments: self.all.append(arguments[2]))

    def about(self, text):
        return [statement for statement in self.all if text in statement]


def test_an_idle_poll_asks_for_no_pause(engine):
    insert(engine, "a", topic=PLACED)
    pause(engine, PLACED)
    transactions = relay(engine)
    drain(engine, transactions)
    statements = Statements(engine)
    assert transactions.claim() is None

    assert statements.about("outbox_partition")
    assert statements.about("outbox_pause") == []


def test_a_paused_message_is_moved_once(engine):
    insert(engine, *["a", "b", None] * 10, topic=PLACED)
    pause(engine, PLACED)
    statements = Statements(engine)
    for _ in range(3):
        drain(engine)

    moves = [each for each in statements.about("SET state=?, holds=") if not each.startswith("WITH due")]
    assert len(moves) == 1


class Pauses(Stopping):
    """Never waits; notes each pause, and stops the relay after so many."""

    def __init__(self, most):
        self.event, self.all, self.most = threading.Event(), [], most
        super().__init__(self.event, grace_s=0)

    def wait(self, timeout_s):
        self.all.append(timeout_s)
        if len(self.all) >= self.most:
            self.event.set()


def test_the_loop_rests_after_a_claim_that_found_paused_messages_only(engine):
    insert(engine, *["a"] * 100, topic=PLACED)
    pause(engine, PLACED)
    stopping = Pauses(5)
    publisher = MemoryPublisher()
    Relay(relay(engine, batch_size=40), publisher, stopping, lease_s=30, poll_interval_s=0.5).run()

    assert publisher.published == []
    assert all(0.01 <= each <= 0.02 for each in stopping.all[:3]), "40, 40 and 20 messages moved"
    assert 0.02 < stopping.all[3] < stopping.all[4], "idle polls"
    assert states(engine) == ["blocked"] * 100


# Commands


@pytest.fixture
def command(engine, tmp_path):
    def command(*arguments, code=0):
        done = CliRunner().invoke(main, [*arguments, "--database-url", f"sqlite:///{tmp_path / 'outbox.db'}"])
        assert done.exit_code == code, done.output
        return done.output

    return command


def test_the_commands_pause_show_and_resume(engine, command):
    insert(engine, "a", None, topic=PLACED)
    assert "paused         nothing" in command("status")
    assert command("pause", "orders.*") == "orders.*: paused\n"
    assert command("pause", "orders.*") == "orders.*: was paused already\n"
    drain(engine)

    assert "paused         1\n  orders.*  for 0 s\n" in command("status")
    assert json.loads(command("status", "--json"))["paused"] == [
        {"topics": "orders.*", "paused_for_s": pytest.approx(0, abs=5), "resuming": False}
    ]
    assert command("resume", "orders.*") == "orders.*: resumed, 2 messages let go\n"
    assert json.loads(command("status", "--json"))["paused"] == []
    assert len(drain(engine)) == 2


def test_status_shows_a_resume_that_was_interrupted(engine, command):
    pause(engine, "orders.*")
    Resume(engine, DEFAULT, "orders.*").begin()

    assert "orders.*  for 0 s  resuming; if that was interrupted, run resume again" in command("status")
    assert json.loads(command("status", "--json"))["paused"][0]["resuming"] is True
    assert command("resume", "orders.*") == "orders.*: resumed, 0 messages let go\n"


def test_what_is_not_paused_cannot_be_resumed(engine, command):
    assert command("resume", PLACED, code=1) == "Error: orders.placed: is not paused; nothing is\n"
    pause(engine, "orders.*")
    assert command("resume", PLACED, code=1) == "Error: orders.placed: is not paused; paused: orders.*\n"


@pytest.mark.parametrize("topics", ["", "orders.", "orders.p*", "a b"])
def test_what_is_no_pattern_is_a_usage_error(command, topics):
    assert "is no pattern of topics" in command("pause", topics, code=2)


def test_without_the_tables_the_commands_say_so(engine, command):
    with engine.begin() as connection:
        DEFAULT.pause.drop(connection)
    assert "schema verify" in command("pause", "orders.*", code=5)


def test_rows_of_a_pause_are_found_by_their_own_topic_only(engine):
    kept = insert(engine, "a", topic="orders-old.placed")
    moved = insert(engine, "b", topic=PLACED)
    pause(engine, "#")
    drain(engine)
    pause(engine, "orders.*")
    with engine.begin() as connection:
        connection.execute(sa.delete(DEFAULT.pause).where(DEFAULT.pause.c.topics == "#"))
    assert resume(engine, "orders.*") == 1

    assert drain(engine) == moved
    with engine.begin() as connection:
        assert list(connection.execute(sa.select(message.c.message_id)).scalars()) == kept
