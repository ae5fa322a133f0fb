"""Pausing and resuming on PostgreSQL, while relays are at work."""

import json
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import sqlalchemy as sa
from click.testing import CliRunner
from sqlalchemy import event
from sqlalchemy.exc import OperationalError

from outbox.backoff import Backoff
from outbox.cli import main
from outbox.policies import Policies
from outbox.publishers.flight import CONFIRMED
from outbox.relay import Transactions, resuming
from outbox.relay.resuming import Resume
from outbox.states import Outcome, RetryPolicy, Verdict
from outbox.store import claim, pauses
from outbox.tables import DEFAULT
from tests.faults import processes
from tests.faults.observer import Observer
from tests.integration.consuming import until
from tests.rows import insert, states

PLACED, PAID, OTHER = "orders.placed", "orders.paid", "stock.moved"


def relay(engine, owner="relay", *, batch_size=1000):
    policy = RetryPolicy(max_attempts=10_000, backoff=Backoff(first_s=0, ceiling_s=0))
    return Transactions(engine, DEFAULT, owner=owner, lease_s=30, batch_size=batch_size, policies=Policies(policy))


def settle(transactions, batch):
    return transactions.settle(batch, {row.id: CONFIRMED for row in batch.rows})


def drain(engine):
    transactions, published = relay(engine), []
    for batch in iter(transactions.claim, None):
        published += [row.message_id for row in batch.rows]
        settle(transactions, batch)
    return published


def pause(engine, topics):
    with engine.begin() as connection:
        return pauses.add(connection, DEFAULT, topics)


def resume(engine, topics):
    resumption = Resume(engine, DEFAULT, topics)
    if not resumption.begin():
        return None
    number = sum(resumption.steps())
    resumption.finish()
    return number


def paused(engine):
    with engine.begin() as connection:
        return [each.topics for each in pauses.listed(connection, DEFAULT)]


def test_a_paused_topic_waits_and_all_follows_in_order_after_the_resume(engine, monkeypatch):
    monkeypatch.setattr(resuming, "BATCH", 7)
    inserted = [insert(engine, "a", topic=topic)[0] for topic in [OTHER, PLACED, PAID, OTHER] * 10]
    unkeyed = insert(engine, *[None] * 20, topic=PLACED)
    pause(engine, "orders.*")
    assert drain(engine) == inserted[:1]

    assert resume(engine, "orders.*") == 40
    published = drain(engine)
    assert [each for each in published if each not in unkeyed] == inserted[1:]
    assert sorted(each for each in published if each in unkeyed) == sorted(unkeyed)
    assert states(engine) == []


def test_an_idle_poll_asks_for_no_pause(engine):
    insert(engine, "a", topic=PLACED)
    pause(engine, PLACED)
    transactions, asked = relay(engine), []
    event.listen(engine, "before_cursor_execute", lambda *given: asked.append(given[2]))
    settle(transactions, transactions.claim())
    assert any("outbox_pause" in statement for statement in asked)
    asked.clear()

    assert transactions.claim() is None
    assert asked
    assert not any("outbox_pause" in statement for statement in asked)


# Against claims and settles that are under way


def test_a_resume_waits_for_a_claim_that_has_seen_the_pause(engine):
    """Otherwise the claim could block a message after the resume has looked for blocked ones."""
    insert(engine, "a", None, topic=PLACED)
    pause(engine, PLACED)
    claiming, go_on = threading.Event(), threading.Event()

    def hang(_connection, _cursor, statement, *_rest):
        if "outbox_pause" in statement and "SELECT" in statement and threading.current_thread().name.startswith("claim"):
            claiming.set()
            assert go_on.wait(20)

    event.listen(engine, "after_cursor_execute", hang)
    with ThreadPoolExecutor(1, thread_name_prefix="claim") as claims, ThreadPoolExecutor(1) as resumes:
        batch = claims.submit(relay(engine).claim)
        assert claiming.wait(20)
        resumed = resumes.submit(resume, engine, PLACED)
        until(lambda: lock_waits(engine) == 1)
        assert not resumed.done()
        go_on.set()
        assert batch.result().set_aside == 2
        assert resumed.result() == 2

    assert "blocked" not in states(engine)
    assert paused(engine) == []


def lock_waits(engine):
    with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        query = "SELECT count(*) FROM pg_locks WHERE NOT granted AND relation = 'outbox_partition'::regclass"
        return connection.execute(sa.text(query)).scalar_one()


def test_a_transaction_that_hangs_under_its_lease_ends_the_resume_and_not_the_pause(engine, monkeypatch):
    monkeypatch.setattr(resuming, "_LOCK_LIMIT_S", 0.2)
    insert(engine, "a", topic=PLACED)
    pause(engine, PLACED)
    with engine.begin() as hanging:
        claim.lease_partitions(hanging, DEFAULT, owner="x", lease_s=0, most=16)
        with pytest.raises(OperationalError, match="statement timeout"):
            resume(engine, PLACED)
    with engine.begin() as connection:
        assert pauses.active(connection, DEFAULT) == [PLACED]

    assert resume(engine, PLACED) == 0
    assert len(drain(engine)) == 1


KEYS = [f"key-{number}" for number in range(20)]
HELD, REJECTED = Verdict(Outcome.HELD), Verdict(Outcome.REJECTED, "unroutable")


class Crowd:
    """Producers, relays and operators at once; `of_key` is what was enqueued, `published` what went out, in order."""

    def __init__(self, engine):
        self.engine, self.stop, self.lock = engine, threading.Event(), threading.Lock()
        self.of_key, self.published = {}, []

    def produce(self, rounds):
        topics = [PLACED, PAID, OTHER]
        for number in range(rounds):
            for each, key in enumerate([*KEYS, None]):
                (new,) = insert(self.engine, key, topic=topics[(number + each) % 3])
                self.of_key[new] = key

    def operate(self, pattern):
        while not self.stop.is_set():
            pause(self.engine, pattern)
            self.stop.wait(0.05)
            resume(self.engine, pattern)

    def work(self, name):
        transactions = relay(self.engine, name, batch_size=300)
        while not self.stop.is_set():
            batch = transactions.claim()
            if batch is None:
                self.stop.wait(0.01)
                continue
            verdicts = judge(batch.rows)
            with self.lock:
                self.published += [row.message_id for row in batch.rows if verdicts[row.id] is CONFIRMED]
            assert transactions.settle(batch, verdicts).fenced == 0


def judge(rows):
    """Reject a few messages, twice each, and hold the rest of their keys."""
    verdicts, failed = {}, set()
    for row in rows:
        if row.key in failed:
            verdicts[row.id] = HELD
        elif row.key is not None and row.id % 17 == 0 and row.attempts < 2:
            verdicts[row.id] = REJECTED
            failed.add(row.key)
        else:
            verdicts[row.id] = CONFIRMED
    return verdicts


def test_relays_pauses_and_resumes_at_once_leave_nothing_behind_and_reorder_no_key(engine, monkeypatch):
    monkeypatch.setattr(resuming, "BATCH", 20)
    crowd = Crowd(engine)
    with ThreadPoolExecutor(5) as pool:
        relays = [pool.submit(crowd.work, f"relay-{number}") for number in range(3)]
        operators = [pool.submit(crowd.operate, pattern) for pattern in ("orders.*", PLACED)]
        try:
            crowd.produce(rounds=25)
        finally:
            crowd.stop.set()
        for each in relays + operators:
            each.result(30)
    for pattern in paused(engine):
        resume(engine, pattern)
    crowd.stop.clear()
    with ThreadPoolExecutor(1) as pool:
        last = pool.submit(crowd.work, "last")
        try:
            until(lambda: states(engine) == [])
        finally:
            crowd.stop.set()
        last.result(30)

    assert sorted(crowd.published) == sorted(crowd.of_key)
    for key in KEYS:
        enqueued = [each for each, its in crowd.of_key.items() if its == key]
        assert [each for each in crowd.published if crowd.of_key[each] == key] == enqueued


# What a resume costs


def test_a_resume_reads_what_it_lets_go_and_no_more(engine):
    """Also when the statistics are from before, and much is blocked in other topics."""
    with engine.begin() as connection:
        for topic, number in ((OTHER, 30_000), (PLACED, 2000)):
            connection.execute(
                sa.text(
                    "INSERT INTO outbox_message (message_id, topic, partition, type, content_type, payload, state)"
                    f" SELECT gen_random_uuid(), '{topic}', n % 64, 't', 'c', '', 'blocked' FROM generate_series(1, {number}) AS n"
                )
            )
    with engine.connect() as connection:
        read = []
        plan(connection, read)
        assert pauses.next_blocked_topic(connection, DEFAULT, after="") == PLACED
        number, last = pauses.count_blocked(connection, DEFAULT, PLACED)
        ids = pauses.blocked_ids(connection, DEFAULT, PLACED, after=0, last=last, limit=500)
        rest = pauses.blocked_ids(connection, DEFAULT, PLACED, after=ids[-1], last=last, limit=500)
        connection.rollback()

    assert (number, len(ids), rest[0]) == (2000, 500, ids[-1] + 1)
    assert all("outbox_message_blocked_ix" in each for each in read)
    assert [rows_read(each) for each in read] == [1, 2000, 500, 500]


def plan(connection, read):
    def explain(_connection, cursor, statement, parameters, _context, _executemany):
        with cursor.connection.cursor() as own:
            own.execute(f"EXPLAIN (ANALYZE, FORMAT JSON) {statement}", parameters)
            read.append(json.dumps(own.fetchone()[0][0]["Plan"]))

    event.listen(connection, "before_cursor_execute", explain)


def rows_read(text):
    def scanned(node):
        own = node["Actual Rows"] + node.get("Rows Removed by Filter", 0) if "Index Name" in node else 0
        return own + sum(scanned(inner) for inner in node.get("Plans", ()))

    return scanned(json.loads(text))


# The whole thing


def command(url, *arguments):
    done = CliRunner().invoke(main, [*arguments, "--database-url", url])
    assert done.exit_code == 0, done.output
    return done.output


def status(url):
    return json.loads(command(url, "status", "--json"))


def test_a_running_relay_obeys_pause_and_resume_and_is_shown(engine, database_url, vhost_url):
    observer = Observer(vhost_url)
    with processes.relay("relay", database_url, vhost_url) as program:
        until(lambda: [each["broker"] for each in status(database_url)["relays"]] == ["connected"])
        command(database_url, "pause", "orders.*")
        first = insert(engine, "a", topic=OTHER)
        rest = [insert(engine, "a", topic=topic)[0] for topic in (PLACED, OTHER, PAID)]
        until(lambda: status(database_url)["messages"] == {"scheduled": 0, "pending": 0, "blocked": 3, "sent": 0, "dead": 0})
        assert arrived(observer) == [str(each) for each in first]

        assert command(database_url, "resume", "orders.*") == "orders.*: resumed, 2 messages let go\n"
        until(lambda: states(engine) == [])
        assert arrived(observer) == [str(each) for each in rest]
        assert program.terminate() == 0
    assert status(database_url)["relays"] == []


def arrived(observer):
    return [each.properties["message_id"] for each in observer.received()]
