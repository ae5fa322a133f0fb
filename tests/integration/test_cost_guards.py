"""What a message costs the database, counted and not timed: statements, row writes, what a statement reads, and a relay's memory."""

import math
import subprocess
import sys
from collections import Counter
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta

import pytest
import sqlalchemy as sa
from sqlalchemy import event

from outbox.backoff import Backoff
from outbox.identity import PARTITIONS
from outbox.policies import Policies
from outbox.publishers.flight import CONFIRMED
from outbox.relay import Transactions, cursor, transactions
from outbox.relay.batch import Delivered
from outbox.states import Outcome, RetryPolicy, Verdict
from outbox.store import claim, dead, failed, pauses, promote, retention, settle
from outbox.store.dead import Selection
from outbox.store.dialects import set_locally
from outbox.store.failed import Claimed, Failure
from outbox.store.plans import WALKING
from outbox.tables import DEFAULT
from tests.integration.test_store_postgres import generate, nodes
from tests.rows import database, insert, states

REJECTED = Verdict(Outcome.REJECTED, "unroutable")
WEEK_S = timedelta(days=7).total_seconds()


@pytest.fixture
def relay(engine, monkeypatch):
    """A relay that does not do what it does a few times a second: look who is writing, and, while it finds something, what is due."""
    monkeypatch.setattr(cursor, "LOOK_EVERY_S", math.inf)
    monkeypatch.setattr(transactions, "_PROMOTE_EVERY_S", math.inf)
    policies = Policies(RetryPolicy(backoff=Backoff(first_s=3600, ceiling_s=3600, floor=1)))
    return lambda **options: Transactions(
        engine, DEFAULT, owner="relay", lease_s=30, batch_size=500, policies=policies, **options
    )


@pytest.fixture
def backlog(engine):
    """More in every partition than a claim takes of it."""
    with engine.begin() as connection:
        for place in range(PARTITIONS):
            generate(connection, 100, "'pending'", key="NULL", place=str(place))


def relay_once(transactions, verdict=CONFIRMED):
    """Claim and settle one batch; return how many messages it had."""
    batch = transactions.claim()
    assert transactions.settle(batch, {row.id: verdict for row in batch.rows}).fenced == 0
    return len(batch.rows)


# Statements


@contextmanager
def counted(engine):
    """Count statements, one for each set of parameters, and transactions."""
    counts = Counter()

    def executed(_connection, _cursor, _statement, parameters, _context, executemany):
        counts["statements"] += len(parameters) if executemany else 1

    def committed(_connection):
        counts["transactions"] += 1

    event.listen(engine, "before_cursor_execute", executed)
    event.listen(engine, "commit", committed)
    yield counts
    event.remove(engine, "before_cursor_execute", executed)
    event.remove(engine, "commit", committed)


@pytest.mark.parametrize("keys", [["a"], [f"key-{number}" for number in range(500)], [None] * 500])
@pytest.mark.parametrize("options", [{}, {"keep_sent": True}])
def test_a_batch_of_any_size_takes_six_statements_in_two_transactions(engine, relay, keys, options):
    place = {} if keys == ["a"] else {"partition": 7}
    with engine.begin() as connection:
        insert(connection, *keys, **place)
    transactions = relay(**options)
    with counted(engine) as counts:
        assert relay_once(transactions) == len(keys)

    assert counts == {"statements": 6, "transactions": 2}


def test_settling_one_batch_and_claiming_the_next_takes_four_statements_in_one_transaction(engine, relay, backlog):
    transactions = relay()
    batch = transactions.claim()
    with counted(engine) as counts:
        turned = transactions.turn_over(Delivered(batch, {row.id: CONFIRMED for row in batch.rows}))

    assert sum(turned.settled.states.values()) == len(turned.batch.rows) == 500
    assert counts == {"statements": 4, "transactions": 1}


def test_an_idle_poll_takes_three_statements_in_one_transaction(engine, relay):
    transactions = relay()
    with counted(engine) as counts:
        assert transactions.claim() is None

    assert counts == {"statements": 3, "transactions": 1}


def test_a_batch_of_failures_takes_no_statement_more_than_one_that_succeeds(engine, relay):
    with engine.begin() as connection:
        insert(connection, *(f"key-{number}" for number in range(300)), partition=7)
    transactions = relay()
    with counted(engine) as counts:
        assert relay_once(transactions, REJECTED) == 300

    assert counts == {"statements": 7, "transactions": 2}
    assert set(states(engine)) == {"scheduled"}


def test_messages_that_must_wait_are_set_aside_by_two_statements_for_all(engine, relay):
    keys = [f"key-{number}" for number in range(100)]
    with engine.begin() as connection:
        insert(connection, *keys, partition=7)
    transactions = relay()
    relay_once(transactions, REJECTED)
    with engine.begin() as connection:
        insert(connection, *keys, partition=7)
    with counted(engine) as counts:
        assert transactions.claim().rows == []

    assert counts == {"statements": 5, "transactions": 1}


def test_large_payloads_take_two_statements_more(engine, relay):
    insert(engine, *[None] * 20, partition=7, payload=b"x" * 20_000)
    transactions = relay()
    with counted(engine) as counts:
        assert relay_once(transactions) == 20

    assert counts == {"statements": 8, "transactions": 2}


# Row writes


@pytest.fixture
def writes(engine):
    """Return a function that tells how many rows of each table were written since it was last asked."""
    with engine.begin() as connection:
        connection.exec_driver_sql("CREATE TABLE written (place text)")
        connection.exec_driver_sql(
            "CREATE FUNCTION note() RETURNS trigger LANGUAGE plpgsql AS"
            " $$ BEGIN INSERT INTO written VALUES (TG_TABLE_NAME || ' ' || lower(TG_OP)); RETURN NULL; END $$"
        )
        for table in ("outbox_message", "outbox_partition"):
            connection.exec_driver_sql(
                f"CREATE TRIGGER note AFTER INSERT OR UPDATE OR DELETE ON {table} FOR EACH ROW EXECUTE FUNCTION note()"
            )

    def read():
        with engine.begin() as connection:
            found = connection.exec_driver_sql("WITH gone AS (DELETE FROM written RETURNING place) SELECT place FROM gone")
            return Counter(found.scalars())

    return read


def test_a_message_that_is_sent_costs_one_row_write_and_a_lease_two_for_all_of_its_messages(engine, relay, writes):
    with engine.begin() as connection:
        for place in range(16):
            generate(connection, 30, "'pending'", key="'key-' || n", place=str(place))
    writes()
    assert relay_once(relay()) == 480

    assert writes() == {"outbox_message delete": 480, "outbox_partition update": 32}


def test_a_message_that_is_kept_costs_an_update_and_its_delete_later(engine, relay, writes):
    insert(engine, *[None] * 50, partition=7)
    writes()
    relay_once(relay(keep_sent=True))
    assert writes() == {"outbox_message update": 50, "outbox_partition update": 2}

    with engine.begin() as connection:
        retention.expire_sent(connection, DEFAULT, older_than_s=0, since=None, most=100)
    assert writes() == {"outbox_message delete": 50}


def test_a_message_that_fails_costs_one_row_write_for_the_failure_and_one_to_be_tried_again(engine, relay, writes):
    insert(engine, *[None] * 50, partition=7)
    writes()
    relay_once(relay(), REJECTED)
    assert writes() == {"outbox_message update": 50, "outbox_partition update": 2}

    with engine.begin() as connection:
        connection.exec_driver_sql("UPDATE outbox_message SET available_at = now() - interval '1 second'")
        writes()
        assert promote.promote(connection, DEFAULT, most=100) == 50
    assert writes()["outbox_message update"] == 100, "the test's own, and one each"


def test_an_idle_poll_writes_nothing(engine, relay, writes):
    insert(engine, None, available_at=sa.func.now() + timedelta(days=1), state="scheduled")
    writes()
    assert relay().claim() is None

    assert writes() == {}


# Memory

CLAIM_AND_TELL_THE_PEAK = """
import sys
from outbox.policies import Policies
from outbox.publishers.flight import CONFIRMED
from outbox.relay import Transactions
from outbox.store.engine import open_engine
from outbox.tables import DEFAULT

engine = open_engine(sys.argv[1])
relay = Transactions(engine, DEFAULT, owner="relay", lease_s=30, batch_size=1000, policies=Policies())
while (batch := relay.claim()) is not None:
    relay.settle(batch, {row.id: CONFIRMED for row in batch.rows})
(peak,) = (line.split()[1] for line in open("/proc/self/status") if line.startswith("VmHWM"))
print(int(peak) // 1024)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells the peak")
@pytest.mark.parametrize(("messages", "size"), [(60, 1_048_576), (5000, 4000), (4000, 16_000)])
def test_a_relay_needs_less_than_150_mib_whatever_the_payloads_are(engine, database_url, messages, size):
    with engine.begin() as connection:
        connection.exec_driver_sql(
            "INSERT INTO outbox_message (message_id, topic, partition, type, content_type, payload) SELECT gen_random_uuid(), 't',"
            f" n %% 16, 't', 'c', convert_to(repeat('x', {size}), 'utf8') FROM generate_series(1, {messages}) AS n"
        )
    done = subprocess.run(
        [sys.executable, "-c", CLAIM_AND_TELL_THE_PEAK, database_url], check=True, capture_output=True, text=True
    )

    assert states(engine) == []
    assert int(done.stdout) < 150


# What each statement reads


@pytest.fixture(scope="module", params=[20_000, pytest.param(200_000, marks=pytest.mark.matrix)])
def crowded(request, postgres):
    """A database with so many messages of every state, of the outbox as well as of a consumer."""
    rows, url = request.param, postgres.create_database()
    engine = database(url)
    with engine.begin() as connection:
        generate(connection, rows, "'pending'", key="'key-' || n", place="n % 64")
        generate(connection, rows // 2, "'scheduled'", key="NULL", place="n % 64")
        generate(connection, rows // 2, "'scheduled'", key="'late-' || n", place="n % 64", error="'unroutable'")
        generate(connection, 100, "'scheduled'", key="NULL", place="n % 64", due="now() - interval '1 second'")
        generate(connection, rows // 2, "'blocked'")
        generate(connection, rows // 2, "'blocked'", key="'late-' || n", place="n % 64")
        generate(connection, rows, "'dead'", key="'dead-' || n", place="n % 64")
        for statement in FILL:
            connection.execute(sa.text(statement), {"rows": rows})
    analyze(engine)
    yield engine
    engine.dispose()
    postgres.drop_database(url)


FILL = (
    (
        "INSERT INTO outbox_message (message_id, topic, partition, type, content_type, payload, state, sent_at) SELECT gen_random_uuid(),"
        " 'orders.placed', n % 64, 't', 'c', '{}', 'sent', now() - interval '8 days' + n * interval '1 second'"
        " FROM generate_series(1, :rows) AS n"
    ),
    (
        "INSERT INTO processed_messages (consumer, message_id, processed_at) SELECT CASE n % 2 WHEN 0 THEN 'shipping' ELSE 'billing' END,"
        " gen_random_uuid(), now() - interval '8 days' + n * interval '1 second' FROM generate_series(1, :rows) AS n"
    ),
    (
        "INSERT INTO failed_messages (consumer, message_id, topic, key, payload, state, attempts, available_at, dead_at)"
        " SELECT 'shipping', state || n, 'orders.placed', state || n, '{}', state, 1,"
        " now() + CASE WHEN n <= 100 THEN -1 ELSE 1 END * interval '1 day', CASE WHEN state = 'dead' THEN now() END"
        " FROM generate_series(1, :rows) AS n, (VALUES ('retry'), ('blocked'), ('dead')) AS states (state)"
    ),
)


def analyze(engine):
    with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        for table in DEFAULT:
            connection.execute(sa.text(f"VACUUM ANALYZE {table.name}"))


LARGE = ("outbox_message", "processed_messages", "failed_messages")
MOST = 50
IDS = range(1, MOST + 1)
FAILURES = [{"row_id": each, "attempts_spent": 1, "error": "x", "error_kind": "x"} for each in IDS]
ALL, MINE = Selection(), Selection(consumer="shipping")
MESSAGE = {"consumer": "shipping", "message_id": "retry7", "topic": "orders.placed", "payload": b""}


def claimed(connection):
    this = sa.and_(DEFAULT.failed.c.consumer == "shipping", DEFAULT.failed.c.message_id == "retry7")
    return Claimed(dict(connection.execute(sa.select(DEFAULT.failed).where(this)).mappings().one()), 1, 0.0)


@dataclass
class Statement:
    """One function of the store, how it is called, and the indexes that it is to walk."""

    run: object
    indexes: set = field(default_factory=set)
    rows: int = 4 * MOST
    pages: int = 2500


STATEMENTS = {
    "lease": Statement(
        lambda c: claim.lease_partitions(c, DEFAULT, owner="x", lease_s=30, most=16), {"outbox_message_pending_ix"}
    ),
    "unsent": Statement(
        lambda c: (set_locally(c, **WALKING), claim.unsent(c, DEFAULT, range(16), limit=MOST, lows=[10_000] * PARTITIONS)),
        {"outbox_message_pending_ix", "outbox_message_again_ix", "outbox_message_held_ix"},
        rows=2 * 16 * MOST,
        pages=8000,
    ),
    "left_behind": Statement(
        lambda c: claim.left_behind(c, DEFAULT, claim.NO_LOWS, dict.fromkeys(range(PARTITIONS), 10**9)),
        {"outbox_message_pending_ix"},
    ),
    "holders": Statement(
        lambda c: claim.holders(c, DEFAULT, ["held", *(f"late-{each}" for each in IDS)]), {"outbox_message_held_ix"}
    ),
    "promote": Statement(lambda c: promote.promote(c, DEFAULT, most=MOST), {"outbox_message_scheduled_ix"}),
    "release": Statement(lambda c: settle.release(c, DEFAULT, leased(c), sent=IDS), {"outbox_message_pk"}),
    "release and keep": Statement(
        lambda c: settle.release(c, DEFAULT, leased(c), sent=IDS, keep_sent=True), {"outbox_message_pk"}
    ),
    "schedule": Statement(
        lambda c: settle.schedule(c, DEFAULT, [each | {"delay_s": 1.0} for each in FAILURES]), {"outbox_message_pk"}
    ),
    "bury": Statement(
        lambda c: settle.bury(c, DEFAULT, [each | {"holds_key": True} for each in FAILURES]), {"outbox_message_pk"}
    ),
    "block": Statement(lambda c: settle.block(c, DEFAULT, IDS), {"outbox_message_pk"}),
    "unblock": Statement(lambda c: settle.unblock(c, DEFAULT, ["held"], most=MOST), {"outbox_message_held_ix"}),
    "park": Statement(
        lambda c: settle.park(c, DEFAULT, [f"late-{each}" for each in IDS], reason="x"), {"outbox_message_held_ix"}
    ),
    "expire_sent": Statement(
        lambda c: retention.expire_sent(c, DEFAULT, older_than_s=WEEK_S, since=None, most=MOST), {"outbox_message_sent_ix"}
    ),
    "expire_processed": Statement(
        lambda c: retention.expire_processed(c, DEFAULT, older_than_s=WEEK_S, since=None, most=MOST),
        {"processed_messages_processed_at_ix"},
    ),
    "expire_processed of one": Statement(
        lambda c: retention.expire_processed(c, DEFAULT, older_than_s=WEEK_S, since=None, most=MOST, consumer="billing"),
        {"processed_messages_processed_at_ix"},
    ),
    "dead find": Statement(lambda c: dead.find(c, DEFAULT, ALL, limit=MOST), {"outbox_message_dead_ix"}),
    "dead choose": Statement(lambda c: dead.choose(c, DEFAULT, ALL, after=0, limit=MOST), {"outbox_message_dead_ix"}),
    "dead retry": Statement(lambda c: dead.retry(c, DEFAULT, ALL, dead_ids(c))),
    "dead discard": Statement(lambda c: dead.discard(c, DEFAULT, ALL, dead_ids(c))),
    "blocked topic": Statement(lambda c: pauses.next_blocked_topic(c, DEFAULT, after=""), {"outbox_message_blocked_ix"}),
    "blocked ids": Statement(
        lambda c: pauses.blocked_ids(c, DEFAULT, "orders.placed", after=0, last=10**9, limit=MOST), {"outbox_message_blocked_ix"}
    ),
    "resume": Statement(lambda c: pauses.unblock(c, DEFAULT, IDS), {"outbox_message_pk"}),
    "failed claim": Statement(
        lambda c: failed.claim(c, DEFAULT, "shipping", most=MOST, lease_s=30), {"failed_messages_due_ix", "failed_messages_pk"}
    ),
    "failed count": Statement(lambda c: failed.count(c, DEFAULT, MESSAGE, lease_s=30)),
    "failed record": Statement(
        lambda c: failed.record(c, DEFAULT, MESSAGE, Failure(error="x", error_class="x", delay_s=1.0), attempts=2)
    ),
    "failed hasten": Statement(
        lambda c: failed.hasten(c, DEFAULT, "shipping", "retry7", delay_s=0), {"failed_messages_message_uq"}
    ),
    "failed postpone": Statement(lambda c: failed.postpone(c, DEFAULT, claimed(c), delay_s=1)),
    "failed clear": Statement(
        lambda c: failed.clear(c, DEFAULT, "shipping", "retry7", waits_for_dead=lambda _topic: True),
        {"failed_messages_message_uq", "failed_messages_key_ix"},
    ),
    "failed find": Statement(lambda c: dead.find(c, DEFAULT, MINE, limit=MOST), {"failed_messages_dead_ix"}),
}


def leased(connection):
    """All partitions, leased; not among the statements that are explained."""
    driver = connection.connection.driver_connection
    return dict(
        driver.execute(
            "UPDATE outbox_partition SET lease_owner = 'x', lease_until = now(), lease_token = lease_token + 1"
            " RETURNING partition, lease_token"
        ).fetchall()
    )


def dead_ids(connection):
    return [each.id for each in dead.choose(connection, DEFAULT, ALL, after=0, limit=MOST)]


@contextmanager
def explained(source):
    """Collect the plan of each statement in the block, which is run for it once more and undone."""
    plans = []

    def explain(_connection, cursor, statement, parameters, _context, _executemany):
        raw = cursor.connection
        with raw.transaction(force_rollback=True), raw.cursor() as own:
            own.execute(f"EXPLAIN (ANALYZE, BUFFERS, FORMAT JSON) {statement}", parameters[0] if _executemany else parameters)
            plans.append(own.fetchone()[0][0]["Plan"])

    event.listen(source, "before_cursor_execute", explain)
    yield plans
    event.remove(source, "before_cursor_execute", explain)


def met(node):
    return (node["Actual Rows"] + node.get("Rows Removed by Filter", 0)) * node["Actual Loops"]


@pytest.mark.parametrize("name", STATEMENTS)
def test_a_statement_walks_its_index_and_reads_what_it_was_asked_for_however_much_there_is(crowded, name):
    statement = STATEMENTS[name]
    with crowded.connect() as connection:
        with explained(connection) as plans:
            statement.run(connection)
        connection.rollback()
    every = [node for plan in plans for node in nodes(plan)]
    of_large = [node for node in every if node.get("Relation Name") in LARGE and "Scan" in node["Node Type"]]

    assert "Seq Scan" not in {node["Node Type"] for node in of_large}
    assert statement.indexes <= {node["Index Name"] for node in every if "Index Name" in node}
    assert sum(met(node) for node in of_large) <= statement.rows
    assert all(met(node) <= 2 * MOST * 16 for node in every if "Sort" in node["Node Type"]), "no sort of more than was read"
    assert sum(plan["Shared Hit Blocks"] + plan["Shared Read Blocks"] for plan in plans) <= statement.pages


def test_a_claim_never_collects_and_sorts_what_is_pending(crowded):
    """Also where the planner takes it for little, as it does when statistics are old."""
    transactions = Transactions(crowded, DEFAULT, owner="relay", lease_s=30, batch_size=16 * MOST, policies=Policies())
    with explained(crowded) as plans:
        batch = transactions.claim()
    transactions.settle(batch, {row.id: Verdict(Outcome.UNSENT) for row in batch.rows})
    met_twice = [node for plan in plans for node in nodes(plan) if node["Node Type"] in ("Bitmap Heap Scan", "Incremental Sort")]
    assert not [node for node in met_twice if node.get("Relation Name") == "outbox_message"]


def test_a_poll_begins_where_the_last_messages_were_published_also_within_the_index(engine, monkeypatch):
    """Under an old snapshot what was published stays in the index; a poll enters it behind that."""
    monkeypatch.setattr(cursor, "LOOK_EVERY_S", 0.0)
    transactions = Transactions(engine, DEFAULT, owner="relay", lease_s=30, batch_size=10_000, policies=Policies())
    with engine.connect().execution_options(isolation_level="REPEATABLE READ") as old:
        old.execute(sa.text("SELECT count(*) FROM outbox_message"))
        with engine.begin() as connection:
            generate(connection, 60_000, "'pending'", key="NULL", place="7")
        while (batch := transactions.claim()) is not None:
            transactions.settle(batch, {row.id: CONFIRMED for row in batch.rows})
        assert [transactions.claim() for _ in range(2)] == [None, None]
        lows = transactions._cursor.lows
        with engine.connect() as connection, explained(connection) as plans:
            assert claim.lease_partitions(connection, DEFAULT, owner="x", lease_s=30, most=16, lows=lows) == {}
            assert claim.unsent(connection, DEFAULT, [7], limit=50, lows=lows).rows == []

    lease, unsent = (plan["Shared Hit Blocks"] + plan["Shared Read Blocks"] for plan in plans)
    assert lease <= 5 * PARTITIONS, "a probe for each"
    assert unsent <= 10
