"""What consumers have given up, on PostgreSQL: operators at once, consumers at work meanwhile, and what the statements cost."""

import asyncio
import json
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime

import pytest
import sqlalchemy as sa

from outbox.cli.exit import DATABASE, FAILURE, SCHEMA
from outbox.inbox.dead import FailedLetters
from outbox.inbox.limits import Guard
from outbox.inbox.message import Message
from outbox.inbox.processing import processing
from outbox.inbox.receiving import Receiver, Work
from outbox.states import OnDead
from outbox.store import dead as store
from outbox.store import failed as failed_store
from outbox.store import given_up
from outbox.store.dead import Selection
from outbox.tables import DEFAULT
from tests.consumers import call, claim_and_receive, failed, receive, shop_at
from tests.integration.consuming import WAIT_S, until
from tests.servers.proc import free_port

INBOX = "shop:inbox"
ALL = Selection()
KINDS = pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])


@pytest.fixture
def shop(database_url, monkeypatch):
    with shop_at(database_url, monkeypatch) as shop:
        yield shop


@pytest.fixture
def ordered(database_url, monkeypatch):
    with shop_at(database_url, monkeypatch, ordered=True) as shop:
        yield shop


def generate(shop, number, *, state="dead", key="NULL", consumer="shipping"):
    """Insert rows in one statement; the key is SQL, with `n` from 1."""
    with shop.engine.begin() as connection:
        connection.execute(
            sa.text(
                "INSERT INTO failed_messages (consumer, message_id, topic, key, payload, state, dead_at)"
                f" SELECT '{consumer}', '{state}-' || n, 'orders.placed', {key}, '\\x7b7d', '{state}',"
                f" CASE WHEN '{state}' = 'dead' THEN now() END FROM generate_series(1, {number}) AS n"
            )
        )


def run(shop, change, selection=ALL):
    """Run a change to its end; return the sizes of its batches."""
    with processing(shop.inbox) as run:
        return list(getattr(FailedLetters(shop.inbox, run), change)(selection))


def lock_waits(shop):
    waits = sa.text("SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'")
    with shop.engine.connect() as connection:
        return connection.execute(waits).scalar_one()


def deadlocks(shop):
    """How many the server has broken up in this database."""
    with shop.engine.connect() as connection:
        connection.execute(sa.text("SELECT pg_stat_clear_snapshot()"))
        query = sa.text("SELECT deadlocks FROM pg_stat_database WHERE datname = current_database()")
        return connection.execute(query).scalar_one()


# The command line


@KINDS
def test_what_has_failed_is_listed_shown_retried_and_discarded(database_url, monkeypatch, is_async):
    with shop_at(database_url, monkeypatch, is_async=is_async) as shop:
        shop.broken = {"bad", "worse"}
        shop.deliver("good", "bad", "worse", key="a")
        listed = [json.loads(line) for line in call("dead", "list", INBOX, "--json").stdout.splitlines()]
        assert [(each["message_id"], each["key"], each["error_class"]) for each in listed] == [
            ("bad", "a", "Refused"),
            ("worse", "a", "Refused"),
        ]
        found = json.loads(call("dead", "show", INBOX, "bad", "--json").stdout)
        assert (found["payload"], [each["error"] for each in found["failures"]]) == ('{"n": 1}', ["not bad"])
        assert call("dead", "list", INBOX, "--topic", "orders.#", "--since", "1h", "--key", "a", "worse").stdout.count("\n") == 1

        before = shop.rows()
        assert call("dead", "retry", INBOX, "bad", "--dry-run").stdout.startswith("would retry 1 message\n")
        assert shop.rows() == before
        call("dead", "retry", INBOX, "absent", "--yes", code=FAILURE)
        assert call("dead", "retry", INBOX, "bad", "--yes").stdout == "retried 1 message\n"
        assert call("dead", "discard", INBOX, "--error-class", "Refused", "--yes", "--json").stdout == '{"discarded": 1}\n'
        shop.broken.clear()
        shop.work()
        assert shop.handled() == ["good", "bad"]
        assert shop.failed() == {}


@KINDS
def test_exit_codes(database_url, monkeypatch, is_async):
    with shop_at(database_url, monkeypatch, is_async=is_async) as shop:
        failed.drop(shop.engine)
        for command in (["status", INBOX], ["dead", "list", INBOX], ["dead", "retry", INBOX, "--all", "--yes"]):
            assert "run: outbox-relay schema verify" in call(*command, code=SCHEMA).stderr
    away = f"postgresql+psycopg://app@127.0.0.1:{free_port()}/shop"
    shop.inbox.sessions.configure(bind=_engine_at(away, is_async=is_async))
    for command in (["status", INBOX], ["dead", "list", INBOX], ["dead", "retry", INBOX, "--all", "--yes"]):
        result = call(*command, code=DATABASE)
        assert result.stderr.startswith("Error: database: ")
        assert "Traceback" not in result.stderr


def _engine_at(url, *, is_async):
    from sqlalchemy.ext.asyncio import create_async_engine

    return create_async_engine(url) if is_async else sa.create_engine(url)


def explaining(plans):
    """Return what puts the plan of every statement into `plans`, for the event `before_cursor_execute`."""

    def explain(_connection, cursor, statement, parameters, _context, _executemany):
        with cursor.connection.cursor() as own:
            own.execute(f"EXPLAIN {statement}", parameters)
            plans.append("\n".join(line for (line,) in own))

    return explain


# Batches


@pytest.mark.parametrize(("change", "left"), [("retry", {"retry": 5000}), ("discard", {})])
def test_some_thousands_are_changed_in_short_transactions_of_a_few_statements(shop, change, left):
    generate(shop, 5000, key="'key-' || n")
    texts, commits = [], []
    sa.event.listen(shop.engine, "before_cursor_execute", lambda *arguments: texts.append(arguments[2]))
    sa.event.listen(shop.engine, "commit", lambda _connection: commits.append(len(texts)))
    assert run(shop, change) == [500] * 10 + [0]
    assert max(later - earlier for earlier, later in zip([0, *commits], commits, strict=False)) <= 6
    assert "pg_advisory_xact_lock" in texts[1]
    assert "LIMIT" in texts[2]
    assert "FOR UPDATE SKIP LOCKED" in texts[3]
    assert Counter(shop.failed().values()) == left


@pytest.mark.parametrize("selection", [ALL, Selection(topics="orders.#", until=datetime(2999, 1, 1, tzinfo=UTC))])
def test_what_is_not_dead_or_of_another_consumer_costs_an_operator_nothing(shop, selection):
    """Also when the statistics are from before anything died."""
    generate(shop, 20_000, state="blocked", key="'key-' || n")
    with shop.engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        connection.execute(sa.text("VACUUM ANALYZE failed_messages"))
    generate(shop, 600)
    generate(shop, 600, consumer="billing")
    mine = Selection(**{name: getattr(selection, name) for name in ("topics", "until")}, consumer="shipping")
    plans = []

    with shop.engine.connect() as connection:
        sa.event.listen(connection, "before_cursor_execute", explaining(plans))
        ids = [each.id for each in store.choose(connection, DEFAULT, mine, after=0, limit=500)]
        assert len(store.choose(connection, DEFAULT, mine, after=ids[-1], limit=500)) == 100
        assert len(store.find(connection, DEFAULT, mine, limit=50)) == 50
        assert store.count(connection, DEFAULT, mine) == 600
        assert given_up.retry(connection, DEFAULT, mine, ids, ordered=True)[0] == 500
        connection.rollback()
        assert given_up.discard(connection, DEFAULT, mine, ids)[0] == 500
        given_up.hold_tried(connection, DEFAULT, "shipping", ["key-7", "key-8"])
        given_up.held_back(connection, DEFAULT, "shipping", ["key-7", "key-8"])
        failed_store.unblock(connection, DEFAULT, "shipping", "key-7", waits_for_dead=lambda _topic: True)

    assert all("Seq Scan" not in plan for plan in plans), plans
    assert all("failed_messages_dead_ix" in plan for plan in plans[:4]), plans
    assert all("failed_messages_dead_ix" in plan or "failed_messages_pk" in plan for plan in plans[4:6]), plans


@pytest.mark.parametrize("dead_block", [False, True])
def test_a_message_of_an_ordered_inbox_costs_no_more_when_a_hundred_thousand_others_wait(ordered, dead_block):
    generate(ordered, 100_000, state="blocked", key="'key-' || n % 50000")
    plans = []
    with ordered.engine.begin() as connection:
        connection.execute(sa.text("ANALYZE failed_messages"))
        sa.event.listen(connection, "before_cursor_execute", explaining(plans))
        message = {"consumer": "shipping", "message_id": "new", "topic": "orders.placed", "key": "key-999", "payload": b""}
        assert failed_store.wait_behind(connection, DEFAULT, message, dead_block=dead_block)
        assert failed_store.unblock(connection, DEFAULT, "shipping", "key-998", waits_for_dead=lambda _topic: dead_block)

    head, _insert, first, _free = plans
    for plan in (head, first):
        assert "failed_messages_key_ix" in plan
        assert "Sort" not in plan
    assert all("Seq Scan" not in plan for plan in plans)


# Two operators


@pytest.mark.parametrize(("change", "left"), [("retry", {"retry": 4000}), ("discard", {})])
def test_operators_at_once_change_each_message_once(shop, change, left):
    generate(shop, 4000)
    barrier = threading.Barrier(4)

    def operate(_number):
        barrier.wait(WAIT_S)
        return sum(run(shop, change))

    with ThreadPoolExecutor(4) as pool:
        done = list(pool.map(operate, range(4)))
    assert sum(done) == 4000
    assert Counter(shop.failed().values()) == left


def test_one_retries_what_another_discards(ordered):
    generate(ordered, 3000, key="'key-' || n % 30")
    barrier = threading.Barrier(2)

    def operate(change):
        barrier.wait(WAIT_S)
        return sum(run(ordered, change))

    with ThreadPoolExecutor(2) as pool:
        retried, discarded = pool.map(operate, ["retry", "discard"])
    assert retried + discarded == 3000
    states = Counter(ordered.failed().values())
    assert sum(states.values()) == retried
    assert states["retry"] == (30 if retried else 0), "one of each key is tried"
    assert deadlocks(ordered) == 0


def test_what_waits_behind_two_dead_messages_goes_on_when_two_operators_discard_them_at_once(ordered, monkeypatch):
    """Each would find the other's there still, and leave what waits to that one."""
    ordered.bury(2, key="a")
    ordered.deliver("2", key="a")
    discard, met = given_up.discard, list[str]()

    def meet(*arguments):
        done = discard(*arguments)
        met.append("one")
        until(lambda: len(met) == 2 or lock_waits(ordered) == 1)
        return done

    monkeypatch.setattr(given_up, "discard", meet)
    with ThreadPoolExecutor(2) as pool:
        sizes = pool.map(lambda each: run(ordered, "discard", Selection(message_ids=(each,))), ["m-0", "m-1"])
        assert list(sizes) == [[1], [1]]
    assert ordered.failed() == {"2": "retry"}


# Consumers at work


def test_a_message_that_arrives_while_what_it_waits_for_is_discarded_is_not_left_waiting(ordered, monkeypatch):
    """The consumer has found the dead one, and not yet written that the new one waits behind it."""
    ordered.broken = {"1"}
    ordered.deliver("1", key="a")
    found, go_on, insert = threading.Event(), threading.Event(), failed_store.insert_into

    def stop_before_waiting(*arguments):
        found.set()
        assert go_on.wait(WAIT_S)
        return insert(*arguments)

    monkeypatch.setattr(failed_store, "insert_into", stop_before_waiting)
    with ThreadPoolExecutor(2) as pool:
        delivery = pool.submit(ordered.deliver, "2", key="a")
        assert found.wait(WAIT_S)
        discard = pool.submit(run, ordered, "discard")
        until(lambda: lock_waits(ordered) == 1)
        go_on.set()
        delivery.result(WAIT_S)
        assert sum(discard.result(WAIT_S)) == 1
    assert ordered.failed() == {"2": "retry"}


def test_a_message_that_is_retried_while_the_one_before_it_comes_to_its_end_is_not_left_waiting(database_url, monkeypatch):
    """The operator has seen that another one is being tried, and has not yet committed that this one waits for it."""
    with shop_at(database_url, monkeypatch, ordered=True, on_dead=OnDead.SKIP) as shop:
        shop.bury(1, prefix="old", key="a")
        shop.bury(1, prefix="tried", key="a", state="retry", dead_at=None, attempts=0)
        held, go_on, hold_tried = threading.Event(), threading.Event(), given_up.hold_tried

        def stop_after_the_look(*arguments):
            hold_tried(*arguments)
            held.set()
            assert go_on.wait(WAIT_S)

        monkeypatch.setattr(given_up, "hold_tried", stop_after_the_look)
        with ThreadPoolExecutor(2) as pool, processing(shop.inbox) as direct:
            works = direct(Receiver(shop.inbox).claim, 10)
            retry = pool.submit(run, shop, "retry")
            assert held.wait(WAIT_S)
            ending = pool.submit(receive, direct, shop.inbox, works[0])
            until(lambda: lock_waits(shop) == 1)
            go_on.set()
            assert sum(retry.result(WAIT_S)) == 1
            ending.result(WAIT_S)
        assert shop.failed() == {"old-0": "retry"}
        shop.work()
        assert shop.handled() == ["tried-0", "old-0"]


@pytest.mark.parametrize("isolation", ["READ COMMITTED", "REPEATABLE READ"])
def test_a_message_that_arrives_while_the_one_before_it_comes_to_its_end_is_not_left_waiting(ordered, monkeypatch, isolation):
    """Also if the application's engine gives every transaction one snapshot, in which the new message would not be yet."""
    ordered.bury(1, prefix="tried", key="a", state="retry", dead_at=None, attempts=0)
    ordered.inbox.sessions.configure(bind=ordered.engine.execution_options(isolation_level=isolation))
    found, go_on, insert = threading.Event(), threading.Event(), failed_store.insert_into

    def stop_before_waiting(*arguments):
        found.set()
        assert go_on.wait(WAIT_S)
        return insert(*arguments)

    with ThreadPoolExecutor(2) as pool, processing(ordered.inbox) as direct:
        works = direct(Receiver(ordered.inbox).claim, 10)
        monkeypatch.setattr(failed_store, "insert_into", stop_before_waiting)
        delivery = pool.submit(ordered.deliver, "new", key="a")
        assert found.wait(WAIT_S)
        ending = pool.submit(receive, direct, ordered.inbox, works[0])
        until(lambda: lock_waits(ordered) == 1)
        go_on.set()
        delivery.result(WAIT_S)
        ending.result(WAIT_S)
    assert ordered.failed() == {"new": "retry"}


class Field:
    """Consumers and operators at work until all messages are handled or discarded. Each of the `doomed` dies twice first."""

    def __init__(self, shop, messages, doomed):
        self.shop, self.messages = shop, messages
        self.lives, self.lock, self.over = dict.fromkeys(doomed, 2), threading.Lock(), threading.Event()
        self.arrived = threading.Event()
        shop._judge = self.judge

    def judge(self, message):
        with self.lock:
            if self.lives.get(message.message_id, 0):
                self.lives[message.message_id] -= 1
                raise RuntimeError("not yet")

    def broker(self):
        """The active consumer's deliveries, one after another, as the queue has them."""
        for message_id, key in self.messages:
            self.try_until_it_is_written_down(Work(Message(message_id=message_id, topic="orders.placed", payload=b"{}", key=key)))
        self.arrived.set()

    def try_until_it_is_written_down(self, work):
        Receiver(self.shop.inbox).receive(work, Guard())

    def consumer(self):
        with processing(self.shop.inbox) as direct:
            while not self.over.is_set():
                claim_and_receive(direct, self.shop.inbox, 5)

    def operate(self, change, keys):
        done = 0
        while not self.over.is_set():
            done += sum(sum(run(self.shop, change, Selection(key=key))) for key in keys)
        return done

    def finish(self, threads):
        """Wait until nothing is left."""
        try:
            until(lambda: any(each.done() for each in threads) or (self.arrived.is_set() and not self.shop.rows()))
        finally:
            self.over.set()


@pytest.mark.parametrize("on_dead", [OnDead.BLOCK, OnDead.SKIP])
def test_operators_and_consumers_at_once_lose_nothing_and_keep_the_order(database_url, monkeypatch, on_dead):
    keys = [f"key-{number % 12:02}" for number in range(180)]
    messages = [(f"{number:03}", key) for number, key in enumerate(keys)]
    retriers, discarded = sorted(set(keys))[:9], sorted(set(keys))[9:]
    with shop_at(database_url, monkeypatch, ordered=True, on_dead=on_dead, lock_timeout_s=None) as shop:
        field = Field(shop, messages, [message_id for message_id, _key in messages[::7]])
        with ThreadPoolExecutor(6) as pool:
            broker = pool.submit(field.broker)
            threads = [
                pool.submit(field.consumer),
                pool.submit(field.consumer),
                pool.submit(field.operate, "retry", retriers),
                pool.submit(field.operate, "retry", retriers[3:]),
                pool.submit(field.operate, "discard", discarded),
            ]
            field.finish(threads)
            broker.result(WAIT_S)
            *_, first, second, gone = (each.result(WAIT_S) for each in threads)

        handled = shop.handled()
        assert shop.failed() == {}
        assert len(handled) == len(set(handled)) == 180 - gone
        assert gone > 0
        assert first + second >= 2 * sum(1 for _id, key in messages[::7] if key in retriers), "each of the doomed died twice"
        assert deadlocks(shop) == 0
        if on_dead is OnDead.BLOCK:
            for key in set(keys):
                order = [each for each in handled if keys[int(each)] == key]
                assert order == sorted(order), key


# Status


@KINDS
def test_status_counts_what_stands_where_and_no_more_than_so_many(database_url, monkeypatch, is_async):
    with shop_at(database_url, monkeypatch, is_async=is_async) as shop:
        generate(shop, 10_001)
        generate(shop, 3, state="retry")
        generate(shop, 2, state="blocked", key="'a'")
        generate(shop, 5, consumer="billing")
        shop.bury(1, prefix="last", dead_at=datetime(2999, 1, 1, tzinfo=UTC), last_error="no \x1b")
        lease(shop, "held", 60)
        lease(shop, "lost-1", -60)
        lease(shop, "lost-2", -60)
        found = json.loads(call("status", INBOX, "--json").stdout)
        assert found["messages"] == {"retry": 3, "blocked": 2, "dead": 10_000}
        assert found["counted_up_to"] == 10_000
        assert (found["consumer"], found["leases"], found["expired"]) == ("shipping", 1, 2)
        assert 0 <= found["oldest_waiting_s"] < 60
        assert (found["newest_dead"]["message_id"], found["newest_dead"]["last_error"]) == ("last-0", "no \x1b")

        shown = call("status", INBOX).stdout
        assert "failed          retry 3  blocked 2  dead 10000+\n" in shown
        assert "leases          held 1  expired 2\n" in shown
        assert "Refused: no \\x1b\n" in shown


def lease(shop, message_id, seconds):
    processed = DEFAULT.processed
    until = sa.text(f"now() + interval '{seconds} s'")
    with shop.engine.begin() as connection:
        connection.execute(
            processed.insert().values(consumer="shipping", message_id=message_id, state="processing", lease_until=until)
        )


def test_an_async_inbox_leaves_no_connection_behind(database_url, monkeypatch):
    with shop_at(database_url, monkeypatch, is_async=True) as shop:
        call("status", INBOX)
        query = sa.text("SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid()")
        with shop.engine.connect() as connection:
            until(lambda: connection.execute(query).scalar_one() == 0)
        assert not asyncio._get_running_loop()
