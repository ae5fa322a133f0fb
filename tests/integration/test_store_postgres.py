"""The statements of the relay on PostgreSQL: fencing, concurrency, and what a poll costs."""

import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta

import pytest
import sqlalchemy as sa
from sqlalchemy import event

from outbox.backoff import Backoff
from outbox.identity import PARTITIONS, partition_of
from outbox.policies import Policies
from outbox.publishers.flight import CONFIRMED
from outbox.relay import Transactions, cursor
from outbox.states import Outcome, RetryPolicy, State, Verdict
from outbox.store import claim, promote, settle
from outbox.tables import DEFAULT
from tests.rows import insert, message, partition, row_of, states, update

REJECTED = Verdict(Outcome.REJECTED, "unroutable")


def relay(engine, owner="relay", *, batch_size=1000):
    policy = RetryPolicy(backoff=Backoff(first_s=3600, ceiling_s=3600, floor=1))
    return Transactions(engine, DEFAULT, owner=owner, lease_s=30, batch_size=batch_size, policies=Policies(policy))


def expire_leases(engine):
    with engine.begin() as connection:
        leased = partition.c.lease_until.is_not(None)
        past = sa.func.now() - timedelta(seconds=1)
        connection.execute(partition.update().where(leased).values(lease_until=past))


def everything(engine):
    """All rows of both tables: equal before and after, nothing was written."""
    with engine.begin() as connection:
        return [list(connection.execute(sa.select(table).order_by(sa.text("1")))) for table in (message, partition)]


def all_of(batch, verdict=CONFIRMED):
    return {row.id: verdict for row in batch.rows}


# Claiming


def test_relays_that_claim_at_once_never_share_a_partition(engine):
    insert(engine, *(f"key-{number}" for number in range(500)))
    barrier = threading.Barrier(8)

    def claim_all(number):
        barrier.wait()
        return list(iter(relay(engine, f"relay-{number}", batch_size=10_000).claim, None))

    with ThreadPoolExecutor(8) as pool:
        batches = [batch for claimed in pool.map(claim_all, range(8)) for batch in claimed]

    taken = Counter(place for batch in batches for place in batch.leases)
    assert set(taken.values()) == {1}
    assert sum(len(batch.rows) for batch in batches) == 500
    assert all({row.partition for row in batch.rows} == set(batch.leases) for batch in batches)


def test_relays_that_claim_and_settle_at_once_take_each_message_once_and_in_order(engine):
    keys = [f"key-{number % 50}" for number in range(2000)]
    insert(engine, *keys)
    barrier, noted, lock = threading.Barrier(6), [], threading.Lock()

    def work(number):
        transactions = relay(engine, f"relay-{number}", batch_size=60)
        barrier.wait()
        while any(state != "sent" for state in states(engine)):
            batch = transactions.claim()
            if batch is None:
                continue
            with lock:
                noted.extend((row.key, row.id) for row in batch.rows)
            assert transactions.settle(batch, all_of(batch)).fenced == 0

    with ThreadPoolExecutor(6) as pool:
        list(pool.map(work, range(6)))

    assert len(noted) == len(set(noted)) == 2000
    assert all([n for k, n in noted if k == key] == sorted(n for k, n in noted if k == key) for key in set(keys))


def test_all_partitions_are_served_before_any_is_served_twice(engine):
    for place in range(PARTITIONS):
        insert(engine, *[None] * 3, partition=place)
    transactions, served = relay(engine, batch_size=16), []
    for _ in range(4):
        batch = transactions.claim()
        served += batch.leases
        transactions.settle(batch, all_of(batch))

    assert sorted(served) == list(range(PARTITIONS))
    assert states(engine) == ["pending"] * 2 * PARTITIONS


def test_no_relay_waits_for_a_partition_that_another_is_taking(engine):
    insert(engine, "a", "b")
    with engine.begin() as other:
        other.execute(sa.select(partition).where(partition.c.partition == partition_of("a")).with_for_update())
        batch = relay(engine).claim()

    assert set(batch.leases) == {partition_of("b")}


def test_a_claim_takes_no_more_partitions_than_asked_for(engine):
    insert(engine, *(f"key-{number}" for number in range(300)))
    with engine.begin() as connection:
        assert len(claim.lease_partitions(connection, DEFAULT, owner="x", lease_s=30, most=5)) == 5


def test_beside_others_a_relay_takes_fewer_partitions_so_that_there_are_some_for_more_than_two(engine):
    for place in range(PARTITIONS):
        insert(engine, *[None] * 3, partition=place)
    relays = [relay(engine, owner, batch_size=16) for owner in ("first", "second", "third", "fourth")]
    batches = [(each, each.claim()) for each in relays]
    assert [len(batch.leases) for _, batch in batches] == [16, 8, 8, 8]
    for each, batch in batches[1:]:
        each.settle(batch, all_of(batch))

    assert len(relays[0].claim(ahead=True).leases) == 16, "its own leases are no others'"


def test_a_lease_stamped_after_a_wait_is_not_already_old(engine):
    """The clock is that of the statement, not of the transaction."""
    insert(engine, "a")
    with engine.begin() as connection:
        connection.execute(sa.text("SELECT pg_sleep(0.2)"))
        began = connection.execute(sa.select(sa.func.now())).scalar_one()
        claim.lease_partitions(connection, DEFAULT, owner="x", lease_s=30, most=5)
        until = connection.execute(sa.select(partition.c.lease_until).where(partition.c.lease_owner == "x")).scalar_one()

    assert until >= began + timedelta(seconds=30.2)


def test_a_late_commit_with_a_lower_id_is_published(engine):
    with engine.connect() as late, engine.connect() as early:
        (slow,) = insert(late, "a")
        (quick,) = insert(early, "b")
        early.commit()
        transactions = relay(engine)
        first = transactions.claim()
        transactions.settle(first, all_of(first))
        late.commit()
    second = transactions.claim()

    assert [row.message_id for row in first.rows] == [quick]
    assert [row.message_id for row in second.rows] == [slow]
    assert second.rows[0].id < first.rows[0].id


def test_a_message_that_is_not_committed_is_not_seen(engine):
    with engine.connect() as open_transaction:
        insert(open_transaction, "a")
        assert relay(engine).claim() is None


# Fencing


def test_a_fenced_relay_writes_nothing(engine):
    insert(engine, "a", "a", "b", None)
    first, second = relay(engine, "first"), relay(engine, "second")
    lost = first.claim()
    expire_leases(engine)
    taken_over = second.claim()
    before = everything(engine)
    settled = first.settle(lost, all_of(lost))

    assert (dict(settled.states), settled.fenced) == ({}, 4)
    assert everything(engine) == before
    assert second.settle(taken_over, all_of(taken_over)).fenced == 0
    assert states(engine) == []


@pytest.mark.parametrize("verdict", [REJECTED, Verdict(Outcome.UNPUBLISHABLE, "x"), Verdict(Outcome.HELD), CONFIRMED])
def test_no_outcome_is_written_after_another_relay_has_settled(engine, verdict):
    (message_id,) = insert(engine, "a")
    first, second = relay(engine, "first"), relay(engine, "second")
    lost = first.claim()
    expire_leases(engine)
    batch = second.claim()
    second.settle(batch, all_of(batch, REJECTED))
    first.settle(lost, all_of(lost, verdict))

    row = row_of(engine, message_id)
    assert (row["state"], row["attempts"]) == ("scheduled", 1)


def test_a_relay_that_lost_one_partition_settles_the_others(engine):
    lost_id, kept_id = insert(engine, "a", "b")
    transactions = relay(engine)
    batch = transactions.claim()
    with engine.begin() as connection:
        lost = partition.c.partition == partition_of("a")
        connection.execute(partition.update().where(lost).values(lease_token=partition.c.lease_token + 1))
    settled = transactions.settle(batch, all_of(batch, REJECTED))

    assert (dict(settled.states), settled.fenced) == ({State.SCHEDULED: 1}, 1)
    assert row_of(engine, lost_id)["state"] == "pending"
    assert row_of(engine, kept_id)["state"] == "scheduled"


def test_a_lease_that_ran_out_is_good_as_long_as_nobody_took_it(engine):
    insert(engine, "a")
    transactions = relay(engine)
    batch = transactions.claim()
    expire_leases(engine)

    assert transactions.settle(batch, all_of(batch)).fenced == 0
    assert states(engine) == []


def test_settling_twice_is_harmless(engine):
    insert(engine, "a", "a", "b")
    transactions = relay(engine)
    batch = transactions.claim()
    verdicts = {row.id: REJECTED if row.key == "b" else CONFIRMED for row in batch.rows}
    transactions.settle(batch, verdicts)
    before = everything(engine)

    assert transactions.settle(batch, verdicts).fenced == 3
    assert everything(engine) == before


def test_settling_counts_what_was_published_and_what_failed_by_partition(engine):
    insert(engine, "a", "a", "b")
    transactions = relay(engine)
    batch = transactions.claim()
    transactions.settle(batch, {row.id: REJECTED if row.key == "b" else CONFIRMED for row in batch.rows})
    with engine.begin() as connection:
        columns = (partition.c.partition, partition.c.published, partition.c.failed)
        rows = connection.execute(sa.select(*columns).where(partition.c.lease_token > 0)).all()

    assert {(row.partition, row.published, row.failed) for row in rows} == {(partition_of("a"), 2, 0), (partition_of("b"), 0, 1)}


def test_a_renewal_prolongs_the_leases_and_returns_them(engine):
    insert(engine, "a", "b")
    transactions = relay(engine)
    batch = transactions.claim()
    expire_leases(engine)

    assert transactions.renew(batch.leases) == set(batch.leases)
    assert relay(engine, "other").claim() is None


def test_a_renewal_returns_only_what_is_still_held(engine):
    insert(engine, "a", "b")
    first = relay(engine, "first")
    batch = first.claim()
    with engine.begin() as connection:
        mine = partition.c.partition == partition_of("a")
        connection.execute(partition.update().where(mine).values(lease_until=sa.func.now() - timedelta(seconds=1)))
    assert set(relay(engine, "second").claim().leases) == {partition_of("a")}
    before = everything(engine)

    assert first.renew(batch.leases) == {partition_of("b")}
    after = everything(engine)
    changed = [old.partition for old, new in zip(before[1], after[1], strict=True) if old != new]
    assert changed == [partition_of("b")]


def test_a_lease_that_was_given_back_cannot_be_renewed(engine):
    insert(engine, "a")
    transactions = relay(engine)
    batch = transactions.claim()
    transactions.settle(batch, all_of(batch, Verdict(Outcome.UNSENT)))

    assert transactions.renew(batch.leases) == set()


# Blocked messages


def drain(engine, transactions):
    """Claim and confirm until nothing is left; return the ids in their order."""
    published = []
    for batch in iter(transactions.claim, None):
        published += [row.id for row in batch.rows]
        transactions.settle(batch, all_of(batch))
    return published


@pytest.mark.parametrize("batch_size", [100, 1000, 10_000])
def test_three_thousand_behind_one_key_go_on_to_the_end_in_order(engine, batch_size):
    (first,) = insert(engine, "a")
    transactions = relay(engine, batch_size=batch_size)
    batch = transactions.claim()
    transactions.settle(batch, all_of(batch, REJECTED))
    with engine.begin() as connection:
        generate(connection, 3000, "'pending'", key="'a'")
    assert transactions.claim().rows == []
    expire_leases(engine)
    for held in iter(transactions.claim, None):
        transactions.settle(held, {})
    assert states(engine) == ["scheduled"] + ["blocked"] * 3000
    update(engine, first, available_at=sa.func.now())
    published = drain(engine, transactions)

    assert len(published) == 3001
    assert published == sorted(published)
    assert states(engine) == []


def test_every_key_goes_on_when_many_get_through_at_once(engine):
    keys = [f"key-{number}" for number in range(40)]
    firsts = insert(engine, *keys)
    transactions = relay(engine, batch_size=10_000)
    for batch in iter(transactions.claim, None):
        transactions.settle(batch, all_of(batch, REJECTED))
    insert(engine, *keys * 60)
    for held in iter(transactions.claim, None):
        transactions.settle(held, {})
    assert Counter(states(engine)) == {"scheduled": 40, "blocked": 2400}
    for message_id in firsts:
        update(engine, message_id, available_at=sa.func.now())

    assert len(drain(engine, transactions)) == 2440


# What a poll costs


def generate(connection, count, state, *, key="'held'", due="now() + interval '1 day'", error="NULL", place=None):
    """Insert rows in one statement; the values are SQL."""
    place = partition_of(key.strip("'")) if place is None else place
    connection.execute(
        sa.text(
            "INSERT INTO outbox_message (message_id, topic, key, partition, type, content_type, payload, state, available_at,"
            f" last_error, dead_at, holds) SELECT gen_random_uuid(), 'orders.placed', {key}, {place}, 't', 'c', '\\x7b7d', {state}, {due},"
            f" {error}, CASE WHEN {state} = 'dead' THEN now() END,"
            f" {key} IS NOT NULL AND ({state} IN ('blocked', 'dead') OR {error} IS NOT NULL) FROM generate_series(1, {count}) AS n"
        )
    )


def generate_waiting(connection, *, tenths):
    """In ten tenths: 50,000 scheduled, 20,000 blocked behind one key, and 20,000 dead."""
    generate(connection, 4500 * tenths, "'scheduled'", key="NULL", place="n % 64")
    generate(connection, 500 * tenths, "'scheduled'", key="'late-' || gen_random_uuid()", place="n % 64", error="'unroutable'")
    generate(connection, 2000 * tenths, "'blocked'")
    generate(connection, 1000 * tenths, "'dead'", key="'dead-' || gen_random_uuid()", place="n % 64")
    generate(connection, 1000 * tenths, "'dead'", key="NULL", place="n % 64")


def generate_deliverable(connection):
    """Some pending messages: of a key each, of the held key, of none; and some that are due."""
    generate(connection, 100, "'pending'", key="'key-' || gen_random_uuid()", place="n % 64")
    generate(connection, 50, "'pending'")
    generate(connection, 50, "'pending'", key="NULL", place="n % 64")
    generate(connection, 50, "'scheduled'", key="NULL", place="n % 64", due="now() - interval '1 second'")


def analyze(engine):
    with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        connection.execute(sa.text("VACUUM ANALYZE outbox_message"))
        connection.execute(sa.text("VACUUM ANALYZE outbox_partition"))


@contextmanager
def explained(connection):
    """Collect the plan of each statement in the block, which is run for it once more and undone."""
    plans = []

    def explain(_connection, cursor, statement, parameters, _context, _executemany):
        raw = cursor.connection
        with raw.transaction(force_rollback=True), raw.cursor() as own:
            first = parameters[0] if isinstance(parameters, list) else parameters
            own.execute(f"EXPLAIN (ANALYZE, BUFFERS, FORMAT JSON) {statement}", first)
            plans.append(own.fetchone()[0][0]["Plan"])

    event.listen(connection, "before_cursor_execute", explain)
    yield plans
    event.remove(connection, "before_cursor_execute", explain)


@dataclass
class Cost:
    """What a statement read: pages, and rows that it met on its way in `outbox_message`, with or without using them."""

    pages: int
    rows: int
    indexes: set[str]
    whole_table: bool


def cost_of(engine, run):
    with engine.connect() as connection, explained(connection) as plans:
        run(connection)
        connection.rollback()
    (plan,) = plans
    every = list(nodes(plan))
    met = sum(
        (node["Actual Rows"] + node.get("Rows Removed by Filter", 0)) * node["Actual Loops"] for node in every if scans(node)
    )
    return Cost(
        pages=plan["Shared Hit Blocks"] + plan["Shared Read Blocks"],
        rows=met,
        indexes={node["Index Name"] for node in every if "Index Name" in node},
        whole_table=any(node["Node Type"] == "Seq Scan" and scans(node) for node in every),
    )


def nodes(plan):
    yield plan
    for inner in plan.get("Plans", ()):
        yield from nodes(inner)


def scans(node):
    return node.get("Relation Name") == "outbox_message" and "Scan" in node["Node Type"]


STATEMENTS = {
    "lease_partitions": (
        lambda connection: claim.lease_partitions(connection, DEFAULT, owner="x", lease_s=30, most=16),
        {"outbox_message_pending_ix", "outbox_message_again_ix"},
    ),
    "unsent": (
        lambda connection: claim.unsent(connection, DEFAULT, range(PARTITIONS), limit=50),
        {"outbox_message_pending_ix", "outbox_message_held_ix"},
    ),
    "promote": (lambda connection: promote.promote(connection, DEFAULT, most=50), {"outbox_message_scheduled_ix"}),
    "unblock": (lambda connection: settle.unblock(connection, DEFAULT, ["held"], most=50), {"outbox_message_held_ix"}),
}


@pytest.mark.parametrize("statement", STATEMENTS)
def test_what_waits_costs_the_loop_nothing(engine, statement):
    with engine.begin() as connection:
        generate_waiting(connection, tenths=1)
        generate_deliverable(connection)
    analyze(engine)
    few = cost_of(engine, STATEMENTS[statement][0])
    with engine.begin() as connection:
        generate_waiting(connection, tenths=9)
    analyze(engine)
    many = cost_of(engine, STATEMENTS[statement][0])

    assert STATEMENTS[statement][1] <= many.indexes
    assert not many.whole_table
    assert many.rows <= 2 * max(200, PARTITIONS), "the rows it delivers, and one probe for each"
    assert many.pages <= few.pages * 1.5 + 4 * PARTITIONS


@pytest.mark.parametrize("statement", STATEMENTS)
def test_a_sudden_backlog_after_long_quiet_does_not_mislead_the_planner(engine, statement):
    """Statistics are from when nothing was pending."""
    with engine.begin() as connection:
        generate_waiting(connection, tenths=10)
    analyze(engine)
    with engine.begin() as connection:
        generate_deliverable(connection)
        generate(connection, 50_000, "'pending'", key="'key-' || gen_random_uuid()", place="n % 64")
    cost = cost_of(engine, STATEMENTS[statement][0])

    assert STATEMENTS[statement][1] <= cost.indexes
    assert not cost.whole_table
    assert cost.rows <= 2 * 50 * PARTITIONS, "what it was asked for, and one probe for each"


@pytest.mark.parametrize("statement", ["lease_partitions", "unsent"])
def test_a_session_that_holds_back_vacuum_does_not_make_polls_dearer(engine, monkeypatch, statement):
    monkeypatch.setattr(cursor, "LOOK_EVERY_S", 0.0)
    transactions = relay(engine, batch_size=10_000)
    with engine.connect().execution_options(isolation_level="REPEATABLE READ") as old:
        old.execute(sa.text("SELECT count(*) FROM outbox_message"))
        with engine.begin() as connection:
            generate(connection, 30_000, "'pending'", key="'key-' || gen_random_uuid()", place="n % 64")
        while (batch := transactions.claim()) is not None:
            transactions.settle(batch, all_of(batch))
        assert [transactions.claim() for _ in range(2)] == [None, None]
        with engine.begin() as connection:
            generate_deliverable(connection)
        analyze(engine)
        lows = transactions._cursor.lows
        costs = {
            "lease_partitions": lambda c: claim.lease_partitions(c, DEFAULT, owner="x", lease_s=30, most=16, lows=lows),
            "unsent": lambda c: claim.unsent(c, DEFAULT, range(PARTITIONS), limit=50, lows=lows),
        }

        assert cost_of(engine, costs[statement]).pages < 3000
