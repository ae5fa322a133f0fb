"""Cleaning up on PostgreSQL: beside relays, operators and other cleaners, and at a cost that does not grow with the table."""

import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import timedelta

import pytest
import sqlalchemy as sa
from sqlalchemy import event

import outbox
from outbox.inbox import once
from outbox.inbox.retention import forget
from outbox.migrations.sql import apply
from outbox.policies import Policies
from outbox.publishers.flight import CONFIRMED
from outbox.relay import Transactions
from outbox.relay.cleanup import BATCH, Cleanup
from outbox.store import retention
from outbox.tables import DEFAULT, Tables
from tests.rows import insert, message, row_of, states

DAY_S = 86_400.0
WEEK = {"older_than_s": 7 * DAY_S, "since": None}
processed = DEFAULT.processed


def cleaner(engine, *, clock=lambda: 0.0, tables=DEFAULT):
    return Cleanup(engine, tables, retention_s=7 * DAY_S, inbox_retention_s=30 * DAY_S, clock=clock)


def relay(engine, owner):
    return Transactions(engine, DEFAULT, owner=owner, lease_s=30, batch_size=200, policies=Policies(), keep_sent=True)


def generate(connection, count, *, state="sent", age="8 days", table="outbox_message"):
    """Insert rows of one state that are all of this age, one microsecond apart, in one statement."""
    time = f"now() - interval '{age}' + n * interval '1 microsecond'"
    sent_at, dead_at = (time if state == word else "NULL" for word in ("sent", "dead"))
    connection.execute(
        sa.text(
            f"INSERT INTO {table} (message_id, topic, partition, type, content_type, payload, state, sent_at, dead_at, created_at,"
            f" available_at) SELECT gen_random_uuid(), 'orders.placed', n % 64, 't', 'c', '\\x7b7d', '{state}', {sent_at},"
            f" {dead_at}, {time}, {time} FROM generate_series(1, {count}) AS n"
        )
    )


def generate_processed(connection, count, *, age, consumer="shipping"):
    time = f"now() - interval '{age}' + n * interval '1 microsecond'"
    connection.execute(
        sa.text(
            "INSERT INTO processed_messages (consumer, message_id, processed_at)"
            f" SELECT '{consumer}', gen_random_uuid()::text, {time} FROM generate_series(1, {count}) AS n"
        )
    )


def count(engine, table=message, *conditions):
    with engine.connect() as connection:
        return connection.execute(sa.select(sa.func.count()).select_from(table).where(*conditions)).scalar_one()


# What is deleted


def test_sent_messages_are_kept_and_deleted_after_their_time_only(engine):
    insert(engine, "a", "b")
    transactions = relay(engine, "relay")
    batch = transactions.claim()
    transactions.settle(batch, {row.id: CONFIRMED for row in batch.rows})
    assert transactions.claim() is None
    with engine.begin() as connection:
        generate(connection, 3, age="7 days 1 minute")
        generate(connection, 2, age="6 days 23 hours 59 minutes")
    clean_up = cleaner(engine)
    for _ in range(3):
        clean_up.turn()

    assert states(engine) == ["sent"] * 4


def test_unsent_messages_are_never_deleted_whatever_their_age(engine):
    with engine.begin() as connection:
        for state in ("pending", "scheduled", "blocked", "dead"):
            generate(connection, 10, state=state, age="100 years")
        generate(connection, 10, age="100 years")
        assert retention.expire_sent(connection, DEFAULT, older_than_s=1, since=None, most=1000).count == 10

    assert Counter(states(engine)) == {"pending": 10, "scheduled": 10, "blocked": 10, "dead": 10}


def test_inbox_records_are_deleted_after_their_time_and_forget_takes_one_consumers(engine):
    with engine.begin() as connection:
        generate_processed(connection, 5, age="31 days")
        generate_processed(connection, 4, age="31 days", consumer="billing")
        generate_processed(connection, 3, age="29 days")
        assert [forget(connection, "shipping", timedelta(days=30), 3) for _ in range(3)] == [3, 2, 0]
    assert count(engine, processed, processed.c.consumer == "billing") == 4
    clean_up = cleaner(engine)
    for _ in range(3):
        clean_up.turn()

    assert count(engine, processed) == 3


def test_a_forgotten_message_is_new_also_when_it_arrives_while_it_is_deleted(engine):
    with engine.begin() as connection:
        connection.execute(
            processed.insert().values(consumer="shipping", message_id="m", processed_at=sa.func.now() - timedelta(days=31))
        )
    with ThreadPoolExecutor(1) as pool:
        with engine.begin() as connection:
            assert forget(connection, "shipping", timedelta(days=30)) == 1
            redelivery = pool.submit(handle, engine)
            until_somebody_waits(engine)
        assert redelivery.result(30) is True

    assert count(engine, processed) == 1


def handle(engine):
    with engine.begin() as connection, once(connection, "shipping", "m") as first:
        return first


def until_somebody_waits(engine):
    waiting = sa.text("SELECT count(*) FROM pg_locks WHERE NOT granted")
    with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        while not connection.execute(waiting).scalar_one():
            pass


def test_relays_that_are_gone_are_deleted_and_one_that_comes_back_meanwhile_is_left(engine):
    rows = [{"owner": owner, "version": "1", "broker": "amqp"} for owner in ("gone", "woken", "alive")]
    with engine.begin() as connection:
        connection.execute(sa.insert(DEFAULT.relay), rows)
        old = DEFAULT.relay.c.owner != "alive"
        connection.execute(DEFAULT.relay.update().where(old).values(seen_at=sa.func.now() - timedelta(days=2)))
    with engine.begin() as woken:
        woken.execute(DEFAULT.relay.update().where(DEFAULT.relay.c.owner == "woken").values(seen_at=sa.func.now()))
        clean_up = cleaner(engine)
        for _ in range(3):
            clean_up.turn()

    with engine.connect() as connection:
        assert set(connection.execute(sa.select(DEFAULT.relay.c.owner)).scalars()) == {"woken", "alive"}


# Beside others


def test_of_two_cleaners_at_once_one_works_and_the_other_leaves(engine, caplog):
    with engine.begin() as connection:
        generate(connection, 2 * BATCH)
    working, released = threading.Barrier(2), threading.Barrier(2)

    def work_slowly():
        with engine.begin() as connection:
            assert retention.try_lock(connection, DEFAULT)
            deleted = retention.expire_sent(connection, DEFAULT, **WEEK, most=BATCH)
            working.wait(30)
            released.wait(30)
            return deleted.count

    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(work_slowly)
        working.wait(30)
        second = cleaner(engine)
        for _ in range(4):
            second.turn()
        assert count(engine) == 2 * BATCH, "the second has deleted nothing, and waited for nothing"
        released.wait(30)
        assert first.result(30) == BATCH

    second.turn()
    assert count(engine) == BATCH, "not before its next look"
    assert caplog.records == []


def test_cleaners_that_begin_together_delete_everything_once(engine):
    with engine.begin() as connection:
        generate(connection, 4 * BATCH)
    barrier, at_once, most, lock = threading.Barrier(4), [0], [0], threading.Lock()

    def work(_number):
        now = [0.0]
        clean_up = cleaner(engine, clock=lambda: now[0])
        barrier.wait(30)
        while count(engine):
            clean_up.turn()
            now[0] += 100

    def inside(change):
        with lock:
            at_once[0] += change
            most[0] = max(most[0], at_once[0])

    expire = retention.expire_sent

    def counted(*arguments, **options):
        inside(+1)
        try:
            return expire(*arguments, **options)
        finally:
            inside(-1)

    errors = postgres_errors(engine)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(retention, "expire_sent", counted)
        with ThreadPoolExecutor(4) as pool:
            list(pool.map(work, range(4)))

    assert count(engine) == 0
    assert most == [1]
    assert errors == []


def postgres_errors(engine):
    """Collect what PostgreSQL complains of from here on."""
    errors = []
    event.listen(engine, "handle_error", lambda context: errors.append(str(context.original_exception)))
    return errors


def test_a_cleaner_beside_relays_that_claim_and_settle_deadlocks_with_nobody_and_loses_nothing(engine):
    inserted = insert(engine, *(f"key-{number % 50}" for number in range(3000)))
    with engine.begin() as connection:
        generate(connection, 3 * BATCH)
    barrier, noted, lock, done = threading.Barrier(4), [], threading.Lock(), threading.Event()
    errors = postgres_errors(engine)

    def publish(number):
        transactions = relay(engine, f"relay-{number}")
        barrier.wait(30)
        while count(engine, message, message.c.state == "pending"):
            batch = transactions.claim()
            if batch is None:
                continue
            with lock:
                noted.extend(row.message_id for row in batch.rows)
            assert transactions.settle(batch, {row.id: CONFIRMED for row in batch.rows}).fenced == 0

    def clean(_number):
        """Everything that is sent, at once: it comes as near to the relays as it can."""
        now = [0.0]
        clean_up = Cleanup(engine, DEFAULT, retention_s=1e-6, inbox_retention_s=None, clock=lambda: now[0])
        barrier.wait(30)
        while not done.is_set() or count(engine):
            clean_up.turn()
            now[0] += 100

    with ThreadPoolExecutor(4) as pool:
        cleaners = [pool.submit(clean, number) for number in range(2)]
        for relay_ in [pool.submit(publish, number) for number in range(2)]:
            relay_.result(60)
        done.set()
        for each in cleaners:
            each.result(60)

    assert errors == []
    assert sorted(noted) == sorted(inserted), "each published, and once"


def test_a_row_that_somebody_has_locked_is_left_for_another_time(engine):
    with engine.begin() as connection:
        generate(connection, 10)
    with engine.begin() as operator:
        operator.execute(sa.select(message.c.id).where(message.c.id == 3).with_for_update())
        with engine.begin() as connection:
            assert retention.expire_sent(connection, DEFAULT, **WEEK, most=100).count == 9
    with engine.begin() as connection:
        assert retention.expire_sent(connection, DEFAULT, **WEEK, most=100).count == 1


def test_the_outboxes_of_two_schemas_are_cleaned_up_beside_each_other(engine):
    other = Tables(schema="Other One")
    with engine.begin() as connection:
        connection.execute(sa.text('CREATE SCHEMA "Other One"'))
        apply(connection, range(1, outbox.migrations.LATEST + 1), schema="Other One")
        generate(connection, 5, table='"Other One".outbox_message')
    with engine.begin() as first, engine.begin() as second, engine.begin() as third:
        assert retention.try_lock(first, DEFAULT)
        assert retention.try_lock(second, other)
        assert not retention.try_lock(third, Tables(schema="public")), "the same tables under another name"
    cleaner(engine, tables=other).turn()

    assert count(engine, other.message) == 0


def test_the_lock_ends_with_its_transaction(engine):
    for _ in range(2):
        with engine.begin() as connection:
            assert retention.try_lock(connection, DEFAULT)
    with engine.begin() as connection:
        assert connection.execute(sa.text("SELECT count(*) FROM pg_locks WHERE locktype = 'advisory'")).scalar_one() == 0


# What it costs


@contextmanager
def explained(connection):
    """Collect the plan of each DELETE in the block, which is run for it once more and undone."""
    plans = []

    def explain(_connection, cursor, statement, parameters, _context, _executemany):
        if statement.startswith("DELETE"):
            raw = cursor.connection
            with raw.transaction(force_rollback=True), raw.cursor() as own:
                own.execute(f"EXPLAIN (ANALYZE, BUFFERS, FORMAT JSON) {statement}", parameters)
                plans.append(own.fetchone()[0][0]["Plan"])

    event.listen(connection, "before_cursor_execute", explain)
    yield plans
    event.remove(connection, "before_cursor_execute", explain)


def nodes(plan):
    yield plan
    for inner in plan.get("Plans", ()):
        yield from nodes(inner)


def cost_of(engine, expire, **arguments):
    """Pages read and written by one batch, its indexes and its ways to walk a table."""
    with engine.connect() as connection, explained(connection) as plans:
        expire(connection, DEFAULT, **arguments)
        connection.rollback()
    (plan,) = plans
    every = list(nodes(plan))
    indexes = {node["Index Name"] for node in every if "Index Name" in node}
    return plan["Shared Hit Blocks"] + plan["Shared Read Blocks"], indexes, {node["Node Type"] for node in every}


def analyze(engine):
    with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        for table in ("outbox_message", "processed_messages"):
            connection.execute(sa.text(f"VACUUM ANALYZE {table}"))


KINDS = {
    "sent": (retention.expire_sent, "outbox_message_sent_ix"),
    "processed": (retention.expire_processed, "processed_messages_processed_at_ix"),
}


def fill(engine, kind, rows, *, age):
    with engine.begin() as connection:
        (generate if kind == "sent" else generate_processed)(connection, rows, age=age)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("statistics", ["fresh", "of an empty table"])
def test_the_cost_of_a_batch_does_not_grow_with_the_table(engine, kind, statistics):
    expire, index = KINDS[kind]
    analyze(engine)
    fill(engine, kind, BATCH, age="8 days")
    if statistics == "fresh":
        analyze(engine)
    few, _, _ = cost_of(engine, expire, **WEEK, most=BATCH)
    fill(engine, kind, 50_000, age="1 day")
    if statistics == "fresh":
        analyze(engine)
    many, indexes, ways = cost_of(engine, expire, **WEEK, most=BATCH)

    assert indexes == {index}
    assert "Seq Scan" not in ways
    assert many <= few + 300


@pytest.mark.parametrize("kind", KINDS)
def test_a_large_backlog_costs_a_batch_no_more(engine, kind):
    expire, index = KINDS[kind]
    fill(engine, kind, BATCH, age="8 days")
    analyze(engine)
    few, _, _ = cost_of(engine, expire, **WEEK, most=BATCH)
    fill(engine, kind, 50_000, age="8 days")
    analyze(engine)
    many, indexes, _ = cost_of(engine, expire, **WEEK, most=BATCH)

    assert indexes == {index}
    assert many <= few + 300


@pytest.mark.parametrize("kind", KINDS)
def test_a_look_when_nothing_is_due_is_a_probe_of_the_index(engine, kind):
    expire, index = KINDS[kind]
    fill(engine, kind, 50_000, age="1 day")
    with engine.begin() as connection:
        generate(connection, 20_000, state="pending", age="8 days")
    analyze(engine)
    pages, indexes, _ = cost_of(engine, expire, **WEEK, most=BATCH)

    assert indexes == {index}
    assert pages <= 5


@pytest.mark.parametrize("kind", KINDS)
def test_a_session_that_holds_back_vacuum_makes_no_batch_dearer_than_the_first(engine, kind):
    expire, _ = KINDS[kind]
    fill(engine, kind, 50_000, age="8 days")
    analyze(engine)
    first, _, _ = cost_of(engine, expire, **WEEK, most=BATCH)
    with engine.connect().execution_options(isolation_level="REPEATABLE READ") as idle:
        idle.execute(sa.select(message.c.id).limit(1))
        since = None
        for _ in range(8):
            with engine.begin() as connection:
                since = expire(connection, DEFAULT, **WEEK | {"since": since}, most=BATCH).last
        later, _, _ = cost_of(engine, expire, **WEEK | {"since": since}, most=BATCH)

    assert later <= first + 300


def test_what_is_kept_costs_the_claim_nothing(engine):
    with engine.begin() as connection:
        generate(connection, 50_000, age="1 day")
    (message_id,) = insert(engine, "a")
    analyze(engine)
    with engine.connect() as connection:
        plans = []

        def explain(_connection, cursor, statement, parameters, _context, _executemany):
            with cursor.connection.cursor() as own:
                own.execute(f"EXPLAIN (FORMAT JSON) {statement}", parameters)
                plans.append(own.fetchone()[0][0]["Plan"])

        event.listen(connection, "before_cursor_execute", explain)
        outbox_claim(connection)
        connection.rollback()
    assert not any(
        "Seq Scan" in node["Node Type"] and node["Relation Name"] == "outbox_message" for p in plans for node in nodes(p)
    )
    assert row_of(engine, message_id)["state"] == "pending"


def outbox_claim(connection):
    from outbox.store import claim

    leases = claim.lease_partitions(connection, DEFAULT, owner="x", lease_s=30, most=16)
    assert len(claim.unsent(connection, DEFAULT, leases, limit=50).rows) == 1
