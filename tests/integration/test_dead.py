"""Dead letters on PostgreSQL: operators at once, relays at work meanwhile, and what the statements cost."""

import json
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta

import pytest
import sqlalchemy as sa
from click.testing import CliRunner
from sqlalchemy import event

from outbox.backoff import Backoff
from outbox.cli import main
from outbox.cli.exit import DATABASE, FAILURE, SCHEMA, USAGE
from outbox.identity import partition_of
from outbox.policies import Policies
from outbox.publishers.flight import CONFIRMED
from outbox.publishers.memory import MemoryPublisher
from outbox.relay import Transactions, dead
from outbox.states import OnDead, Outcome, RetryPolicy, State, Verdict
from outbox.store import dead as store
from outbox.store import settle
from outbox.store.dead import Selection
from outbox.tables import DEFAULT
from outbox.topics import matches
from tests.rows import insert, partition, row_of, states
from tests.servers.proc import free_port

FATAL = Verdict(Outcome.UNPUBLISHABLE, "too large", "TooLarge")
ALL = Selection()


class Always:
    """A control that lets everything go."""

    def may_send(self):
        return True

    def progress(self):
        pass


def relay(engine, owner="relay", *, on_dead=OnDead.BLOCK, batch_size=1000):
    policies = Policies(RetryPolicy(on_dead=on_dead, backoff=Backoff(first_s=0, ceiling_s=0)))
    return Transactions(engine, DEFAULT, owner=owner, lease_s=30, batch_size=batch_size, policies=policies)


def publish(engine, judge=lambda _row: CONFIRMED, **options):
    """Claim, publish and settle until nothing is left to claim; return the ids of what was published, in order."""
    publisher = MemoryPublisher(judge)
    transactions = relay(engine, **options)
    for batch in iter(transactions.claim, None):
        transactions.settle(batch, publisher.publish(batch.rows, Always()).verdicts)
    return [row.id for row in publisher.published]


def generate(engine, number, state="dead", *, key="'key-' || n % 100", place="n % 64", topic="'orders.placed'"):
    """Insert rows in one statement; the values are SQL, with `n` from 1."""
    with engine.begin() as connection:
        connection.execute(
            sa.text(
                "INSERT INTO outbox_message (message_id, topic, key, partition, type, content_type, payload, state, dead_at, holds)"
                f" SELECT gen_random_uuid(), {topic}, {key}, {place}, 't', 'c', '\\x7b7d', '{state}',"
                f" CASE WHEN '{state}' = 'dead' THEN now() END, {key} IS NOT NULL AND '{state}' IN ('dead', 'blocked')"
                f" FROM generate_series(1, {number}) AS n"
            )
        )


def bury(engine, *keys, **values):
    """Dead letters that hold back their keys."""
    return insert(engine, *keys, **{"state": State.DEAD, "dead_at": datetime.now(UTC), "holds": True} | values)


def run(engine, change, selection=ALL):
    """Run a change to its end on a connection of its own; return the sizes of its batches."""
    with engine.connect() as connection:
        return list(change(connection, DEFAULT, selection))


def call(url, *arguments, code=0):
    result = CliRunner().invoke(main, ["dead", *map(str, arguments), "--database-url", url])
    assert result.exit_code == code, result.output
    return result


# The command line


def test_selections_mean_the_same_as_on_sqlite(engine, database_url):
    died = datetime(2026, 1, 31, 8, 30, tzinfo=UTC)
    usual = {"dead_at": died, "error_class": "Unroutable"}
    topics = ["orders", "orders.placed", "orders.eu.placed", "orders_x.placed", "ordersXplaced", "a.orders"]
    buried = {topic: bury(engine, "a", topic=topic, **usual)[0] for topic in topics}
    (other,) = bury(engine, "b", **usual | {"dead_at": died + timedelta(hours=1), "error_class": "TooLarge"})
    insert(engine, "a")

    def listed(*options):
        return {json.loads(line)["message_id"] for line in call(database_url, "list", "--json", *options).stdout.splitlines()}

    for pattern in ("orders", "orders.#", "orders.*", "#.placed", "#", "*", "#.eu.#", "*.*.placed", "orders_x.placed"):
        found = listed("--topic", pattern, "--key", "a")
        assert found == {str(buried[topic]) for topic in topics if matches(pattern, topic)}, pattern
    for options in (("--key", "b"), ("--since", "2026-01-31T09:00"), ("--error-class", "TooLarge"), (other,)):
        assert listed(*options) == {str(other)}
    assert len(listed("--until", "2026-01-31T09:00")) == len(topics)
    assert listed("--since", "1h") == set()


def test_a_message_is_shown_with_every_attempt_retried_and_discarded(engine, database_url):
    first, second = insert(engine, "a", "a", payload=b"\xff")
    publish(engine, lambda row: FATAL if row.message_id == first else CONFIRMED)

    found = json.loads(call(database_url, "show", first, "--json").stdout)
    (failure,) = found["failures"]
    assert (failure["error"], failure["error_class"], found["payload"]) == ("too large", "TooLarge", "base64:/w==")
    assert abs(datetime.now(UTC) - datetime.fromisoformat(failure["at"])) < timedelta(minutes=1)
    assert f"failures        {failure['at']}  TooLarge  too large\n" in call(database_url, "show", first).stdout

    assert call(database_url, "retry", "--dry-run", "--key", "a").stdout.startswith("would retry 1 message\n")
    assert states(engine) == ["dead", "blocked"]
    assert call(database_url, "retry", first, "--yes", "--json").stdout == '{"retried": 1}\n'
    row = row_of(engine, first)
    assert (row["state"], row["attempts"], row["dead_at"], row["holds"], len(row["failures"])) == ("pending", 0, None, False, 1)

    publish(engine, lambda _row: FATAL)
    assert call(database_url, "discard", first, "--yes").stdout == "discarded 1 message\n"
    assert [row_of(engine, second)["state"]] == states(engine) == ["pending"]


def test_exit_codes(engine, database_url, tmp_path):
    bury(engine, "a")
    away = f"postgresql://app@127.0.0.1:{free_port()}/shop"

    call(database_url, "retry", "--yes", code=USAGE)
    call(database_url, "retry", "--all", code=USAGE)
    call(database_url, "retry", "0198c5a7-6b1e-7c3f-8a53-0f5d5f9d2b11", "--yes", code=FAILURE)
    call(away, "retry", "--all", "--yes", code=DATABASE)
    call(database_url, "retry", "--all", "--yes", "--schema", "absent", code=SCHEMA)
    assert states(engine) == ["dead"]
    call(database_url, "retry", "--key", "absent", "--yes")
    call(database_url, "retry", "--all", "--yes")
    assert states(engine) == ["pending"]


# Batches


@pytest.mark.parametrize("change", [dead.retry, dead.discard])
def test_a_batch_is_one_short_transaction_of_a_few_statements(engine, change):
    generate(engine, 1200, key="NULL")
    texts, commits = [], []
    event.listen(engine, "before_cursor_execute", lambda *arguments: texts.append(arguments[2]))
    event.listen(engine, "commit", lambda _connection: commits.append(len(texts)))

    assert run(engine, change) == [500, 500, 200]
    assert commits == [4, 8, 12]
    limit, choose, lock, write = texts[:4]
    assert limit.startswith("SELECT concat(set_config('statement_timeout'")
    assert "LIMIT" in choose
    assert "FOR UPDATE SKIP LOCKED" in lock
    assert write.startswith(("UPDATE", "DELETE"))


@pytest.mark.parametrize(
    ("selection", "index"),
    [
        (ALL, "outbox_message_dead_ix"),
        (Selection(topics="orders.#", until=datetime(2999, 1, 1, tzinfo=UTC)), "outbox_message_dead_ix"),
    ],
)
def test_what_is_not_dead_costs_an_operator_nothing(engine, selection, index):
    """Also when the statistics are from before anything died."""
    generate(engine, 20_000, "blocked")
    with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        connection.execute(sa.text("VACUUM ANALYZE outbox_message"))
    generate(engine, 600)
    with engine.connect() as connection:
        plans = []

        def explain(_connection, cursor, statement, parameters, _context, _executemany):
            with cursor.connection.cursor() as own:
                own.execute(f"EXPLAIN {statement}", parameters)
                plans.append("\n".join(line for (line,) in own))

        event.listen(connection, "before_cursor_execute", explain)
        chosen = store.choose(connection, DEFAULT, selection, after=0, limit=500)
        assert len(store.find(connection, DEFAULT, selection, limit=50)) == 50
        assert store.count(connection, DEFAULT, selection) == 600
        ids = [each.id for each in chosen]
        assert store.retry(connection, DEFAULT, selection, ids) == 500
        connection.rollback()
        assert store.discard(connection, DEFAULT, selection, ids)[0] == 500

    assert all("Seq Scan" not in plan for plan in plans), plans
    assert all(index in plan for plan in plans[:3]), plans
    assert all(index in plan or "outbox_message_pk" in plan for plan in plans[3:]), plans


# Two operators


@pytest.mark.parametrize(("change", "left"), [(dead.retry, {"pending": 5000}), (dead.discard, {})])
def test_operators_at_once_change_each_message_once(engine, change, left):
    generate(engine, 5000)
    barrier = threading.Barrier(4)

    def operate(_number):
        barrier.wait()
        return sum(run(engine, change))

    with ThreadPoolExecutor(4) as pool:
        done = list(pool.map(operate, range(4)))

    assert sum(done) == 5000
    assert Counter(states(engine)) == left


def test_one_retries_what_another_discards(engine):
    generate(engine, 5000)
    barrier = threading.Barrier(2)

    def operate(change):
        barrier.wait()
        return sum(run(engine, change))

    with ThreadPoolExecutor(2) as pool:
        retried, discarded = pool.map(operate, [dead.retry, dead.discard])

    assert retried + discarded == 5000
    assert Counter(states(engine)) == ({"pending": retried} if retried else {})


def test_what_another_has_changed_between_the_choice_and_the_lock_is_left_alone(engine):
    bury(engine, "a", "a")
    with engine.connect() as first:
        chosen = store.choose(first, DEFAULT, ALL, after=0, limit=500)
        assert run(engine, dead.retry) == [2]
        ids = [each.id for each in chosen]
        assert store.discard(first, DEFAULT, ALL, ids) == (0, set())
        assert store.retry(first, DEFAULT, ALL, ids) == 0


def test_what_has_died_again_after_the_question_is_left_alone(engine):
    bury(engine, "a")
    with engine.connect() as connection:
        asked = Selection(until=store.clock(connection))
        (chosen,) = store.choose(connection, DEFAULT, asked, after=0, limit=500)
        run(engine, dead.retry)
        publish(engine, lambda _row: FATAL)
        assert store.discard(connection, DEFAULT, asked, [chosen.id]) == (0, set())

    assert states(engine) == ["dead"]


# Relays at work


def test_an_operator_waits_for_a_partition_with_no_other_in_hand(engine):
    """A relay that settles locks its partitions in whatever order they lie in the table: waiting in another is a deadlock."""
    low, high = sorted(("a", "b"), key=partition_of)
    bury(engine, low, high)
    free = threading.Event()

    def first_batch_then_the_rest():
        with engine.connect() as connection:
            batches = dead.retry(connection, DEFAULT, ALL)
            sizes = [next(batches)]
            free.set()
            return sizes + list(batches)

    with ThreadPoolExecutor(1) as pool:
        with engine.begin() as settling:
            lock(settling, high)
            operator = pool.submit(first_batch_then_the_rest)
            assert free.wait(30)
            wait_until_blocked(engine)
            lock(settling, low)
        assert operator.result(30) == [1, 1]


def lock(connection, key):
    connection.execute(partition.update().where(partition.c.partition == partition_of(key)).values(published=1))


def wait_until_blocked(engine):
    """Return when somebody waits for a lock."""
    waits = sa.text("SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'")
    until = time.monotonic() + 30
    while time.monotonic() < until:
        with engine.connect() as connection:
            if connection.execute(waits).scalar_one():
                return
    raise AssertionError("nobody waits")


def test_nothing_is_left_blocked_behind_a_message_that_is_discarded_while_a_relay_claims(engine, monkeypatch):
    """The claim has read that the key is held, and not yet written that the follower waits, when the discard comes."""
    (first,) = bury(engine, "a")
    (second,) = insert(engine, "a")
    reached, go_on, block = threading.Event(), threading.Event(), settle.block

    def stop_before_blocking(*arguments):
        reached.set()
        assert go_on.wait(30)
        block(*arguments)

    monkeypatch.setattr(settle, "block", stop_before_blocking)
    with ThreadPoolExecutor(2) as pool:
        claim = pool.submit(relay(engine).claim)
        assert reached.wait(30)
        discard = pool.submit(run, engine, dead.discard, Selection(message_ids=(first,)))
        wait_until_blocked(engine)
        go_on.set()
        assert claim.result(30).rows == []
        assert discard.result(30) == [1]

    assert row_of(engine, second)["state"] == "pending"


class Field:
    """Relays and operators at work on the same messages until all are gone. Each of the `doomed` dies twice before it goes."""

    def __init__(self, engine, on_dead, doomed):
        self.engine, self.on_dead = engine, on_dead
        self.lives = dict.fromkeys(doomed, 2)
        self.published, self.lock, self.over = [], threading.Lock(), threading.Event()

    def judge(self, row):
        with self.lock:
            if self.lives.get(row.message_id, 0):
                self.lives[row.message_id] -= 1
                return FATAL
            self.published.append((row.key, row.id))
            return CONFIRMED

    def relay(self, number):
        transactions = relay(self.engine, f"relay-{number}", on_dead=self.on_dead, batch_size=40)
        publisher = MemoryPublisher(self.judge)
        while not self.over.is_set():
            batch = transactions.claim()
            if batch is not None:
                assert transactions.settle(batch, publisher.publish(batch.rows, Always()).verdicts).fenced == 0

    def operate(self, change, keys):
        done = 0
        while not self.over.is_set():
            done += sum(sum(run(self.engine, change, Selection(key=key))) for key in keys)
        return done

    def wait(self, *threads):
        """Wait until no message is left; in vain, until one waits for what is no longer there."""
        until = time.monotonic() + 60
        while states(self.engine) and not any(each.done() for each in threads) and time.monotonic() < until:
            pass
        self.over.set()


@pytest.mark.parametrize("on_dead", OnDead)
def test_operators_and_relays_at_once_lose_nothing_and_keep_the_order(engine, on_dead):
    keys = [f"key-{number % 20:02}" for number in range(400)]
    with engine.begin() as connection:
        message_ids = insert(connection, *keys)
    retriers, discarded = sorted(set(keys))[:15], sorted(set(keys))[15:]
    field = Field(engine, on_dead, message_ids[::17])
    with ThreadPoolExecutor(6) as pool:
        relays = [pool.submit(field.relay, number) for number in range(3)]
        operators = [
            pool.submit(field.operate, dead.retry, retriers),
            pool.submit(field.operate, dead.retry, retriers[5:]),
            pool.submit(field.operate, dead.discard, discarded),
        ]
        field.wait(*relays, *operators)
        for each in relays:
            each.result(60)
        first, second, gone = (each.result(60) for each in operators)

    assert states(engine) == []
    assert len(field.published) + gone == 400
    assert gone > 0
    assert first + second >= 2 * sum(1 for key in keys[::17] if key in retriers), "each of the doomed was retried twice"
    assert len(field.published) == len(set(field.published))
    if on_dead is not OnDead.SKIP:
        for key in set(keys):
            order = [number for its, number in field.published if its == key]
            assert order == sorted(order), key
