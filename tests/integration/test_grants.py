"""Each part of outbox does its work with the rights of its role, and has no others."""

import asyncio
import json
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
import sqlalchemy as sa
from click.testing import CliRunner
from sqlalchemy.exc import ProgrammingError
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.orm import Session, sessionmaker

import outbox
from outbox import Event, Inbox, Message, enqueue, enqueue_many
from outbox.backoff import Backoff
from outbox.cli import main
from outbox.inbox import once
from outbox.inbox.dead import FailedLetters
from outbox.inbox.processing import processing
from outbox.inbox.retention import forget
from outbox.migrations import LATEST
from outbox.migrations.sql import apply
from outbox.states import RetryPolicy, State
from outbox.store.dead import Selection
from outbox.tables import Tables
from tests.consumers import Work, claim_and_receive, receive
from tests.faults import processes
from tests.faults.observer import Observer
from tests.integration.test_relay import until
from tests.rows import insert
from tests.servers.roles import roles

EVENT = Event(topic="orders.placed", payload={"n": 1}, key="7")
LATER = Event(topic="orders.placed", payload={"n": 2}, delay=timedelta(hours=1))


@dataclass
class Place:
    """A database with the tables, where each part has a role of its own."""

    engine: sa.Engine
    tables: Tables
    urls: dict[str, str]

    def url(self, part: str) -> str:
        return self.urls[part]

    def arguments(self, part: str) -> list[str]:
        schema = [] if self.tables.schema is None else ["--schema", self.tables.schema]
        return ["--database-url", self.urls[part], *schema]

    def rows(self, table: sa.Table | None = None) -> list[Any]:
        table = self.tables.message if table is None else table
        with self.engine.connect() as connection:
            return list(connection.execute(sa.select(table).order_by(*table.primary_key)))

    def write(self, *statements: Any) -> None:
        with self.engine.begin() as connection:
            for statement in statements:
                connection.execute(statement)


@pytest.fixture(params=[None, "my events"], ids=["search path", "schema"])
def place(request: pytest.FixtureRequest, database_url: str) -> Iterator[Place]:
    schema = request.param
    engine = sa.create_engine(database_url, poolclass=sa.NullPool)
    with engine.begin() as connection:
        if schema is not None:
            connection.exec_driver_sql(f'CREATE SCHEMA "{schema}"')
        apply(connection, range(1, LATEST + 1), schema=schema)
    with roles(database_url, *([] if schema is None else ["--schema", schema])) as urls:
        yield Place(engine, Tables(schema=schema), urls)


in_a_schema = pytest.mark.parametrize("place", ["my events"], indirect=True)


def refused(url: str, *statements: str) -> None:
    """All of these are refused for lack of a right, and for nothing else."""
    engine = sa.create_engine(url, poolclass=sa.NullPool)
    for statement in statements:
        with engine.connect() as connection, pytest.raises(ProgrammingError, match=r"permission denied|must be owner"):
            connection.exec_driver_sql(statement)


# The application


def test_an_application_enqueues_with_the_right_to_insert(place: Place) -> None:
    engine, tables = sa.create_engine(place.url("application"), poolclass=sa.NullPool), place.tables
    outbox.wake_relay(engine, "postgres")
    with engine.begin() as connection:
        enqueue(connection, EVENT, tables=tables)
        enqueue(connection, LATER, tables=tables)
        enqueue_many(connection, [EVENT, LATER, LATER], tables=tables)
    with Session(engine) as session:
        enqueue(session, EVENT, tables=tables)
        session.commit()
        enqueue_many(session, [EVENT, LATER], tables=tables)
        session.flush()
        enqueue(session, LATER, tables=tables)
        session.commit()

    assert len(place.rows()) == 9


def test_an_asynchronous_application_does_so_too(place: Place) -> None:
    async def work() -> None:
        engine = create_async_engine(place.url("application"), poolclass=sa.NullPool)
        async with engine.begin() as connection:
            await enqueue(connection, EVENT, tables=place.tables)
        async with AsyncSession(engine) as session:
            enqueue(session, LATER, tables=place.tables)
            await session.commit()

    asyncio.run(work())

    assert [row.state for row in place.rows()] == ["pending", "scheduled"]


@in_a_schema
def test_an_application_may_do_nothing_else(place: Place) -> None:
    there = '"my events".'
    refused(
        place.url("application"),
        f"SELECT id FROM {there}outbox_message",
        f"UPDATE {there}outbox_message SET state = 'pending'",
        f"DELETE FROM {there}outbox_message",
        f"TRUNCATE {there}outbox_message",
        f"INSERT INTO {there}outbox_message (attempts) VALUES (1)",
        f"SELECT setval('{there}outbox_message_id_seq', 1)",
        f"SELECT partition FROM {there}outbox_partition",
        f"SELECT consumer FROM {there}processed_messages",
        f"INSERT INTO {there}outbox_pause (topics) VALUES ('#')",
    )


# The consumer


def inbox(place: Place) -> Inbox:
    shipping = Inbox(
        "shipping", sessions=sessionmaker(sa.create_engine(place.url("consumer"))), tables=place.tables, ordered=True
    )
    policy = RetryPolicy(max_attempts=2, backoff=Backoff(first_s=0, ceiling_s=0))

    @shipping.transactional("orders.#", retry=policy)
    def ship(session: Session, message: Message) -> None:
        if message.message_id.startswith("broken"):
            raise LookupError(message.message_id)

    @shipping.leased("payments.#", retry=policy)
    def pay(lease: Any, message: Message) -> dict[str, str]:
        return {"paid": message.message_id}

    return shipping


def test_a_consumer_handles_tries_again_gives_up_and_forgets(place: Place) -> None:
    shipping = inbox(place)

    def deliver(message_id: str, topic: str = "orders.placed") -> None:
        receive(run, shipping, Work(Message(message_id=message_id, topic=topic, payload=b"{}", key="7")))

    with processing(shipping) as run:
        for message_id in ("good", "good", "broken", "later"):
            deliver(message_id)
        deliver("paid", "payments.due")
        while claim_and_receive(run, shipping):
            pass
        letters = FailedLetters(shipping, run)
        assert sum(letters.retry(Selection(message_ids=("broken",)))) == 1
        while claim_and_receive(run, shipping):
            pass
        assert sum(letters.discard(Selection(message_ids=("broken",)))) == 1
        while claim_and_receive(run, shipping):
            pass
    with shipping.sessions() as session:
        with once(session, "billing", "m-1", tables=place.tables) as first:
            assert first
        session.commit()
    place.write(sa.update(place.tables.processed).values(processed_at=datetime.now(UTC) - timedelta(days=90)))
    with shipping.sessions() as session:
        assert forget(session.connection(), "shipping", timedelta(days=30), tables=place.tables) == 3
        session.commit()
    shipping.sessions.kw["bind"].dispose()

    assert place.rows(place.tables.failed) == []
    assert [(row.consumer, row.message_id) for row in place.rows(place.tables.processed)] == [("billing", "m-1")]


@in_a_schema
def test_a_consumer_may_not_touch_the_outbox_nor_change_what_has_failed(place: Place) -> None:
    refused(
        place.url("consumer"),
        'SELECT id FROM "my events".outbox_message',
        'DELETE FROM "my events".outbox_message',
        'SELECT partition FROM "my events".outbox_partition',
        "UPDATE \"my events\".failed_messages SET payload = ''",
        "UPDATE \"my events\".processed_messages SET message_id = 'other'",
    )


# The relay


def test_a_relay_does_all_of_its_work(place: Place, vhost_url: str) -> None:
    processed, relay = place.tables.processed, place.tables.relay
    observer = Observer(vhost_url)
    long_ago = datetime.now(UTC) - timedelta(days=90)
    place.write(
        processed.insert().values(consumer="shipping", message_id="old", processed_at=long_ago),
        relay.insert().values(owner="long gone", version="0", broker="connected", seen_at=long_ago),
        place.tables.pause.insert().values(topics="paused.#"),
    )
    insert_into(place, "1", state=State.SENT, sent_at=long_ago)
    insert_into(place, "2", state=State.SCHEDULED, available_at=long_ago)
    insert_into(place, "3", topic="paused.topic", type="paused.topic")
    insert_into(place, *"abc")
    options = ("--retention", "30d", "--inbox-retention", "30d", "--wake", "postgres", "--max-attempts", "1", *schema_of(place))
    with processes.relay("relay", place.url("relay"), vhost_url, *options) as program:
        program.wait_until_ready()
        until(lambda: [row.state for row in place.rows()].count(State.SENT) == 4)
        until(lambda: not place.rows(processed) and "long gone" not in [row.owner for row in place.rows(relay)])
        assert len(observer.received()) == 4
        observer.leave()
        insert_into(place, "d")
        insert_into(place, "d")
        until(lambda: count(place, State.DEAD) == 1)
        until(lambda: count(place, State.BLOCKED) == 2)
        until(lambda: presence(place))
        assert len(place.rows(relay)) == 1
        program.terminate()
        log = program.log

    assert place.rows(relay) == []
    assert "permission" not in log
    assert [row.key for row in place.rows() if row.state == State.SENT] == ["2", *"abc"]


@in_a_schema
def test_a_relay_may_not_change_what_a_message_says_nor_enqueue_nor_pause(place: Place) -> None:
    there = '"my events".'
    refused(
        place.url("relay"),
        f"UPDATE {there}outbox_message SET payload = ''",
        f"UPDATE {there}outbox_message SET topic = 'x'",
        f"UPDATE {there}outbox_message SET message_id = gen_random_uuid()",
        f"INSERT INTO {there}outbox_message (topic) VALUES ('x')",
        f"UPDATE {there}processed_messages SET state = 'done'",
        f"INSERT INTO {there}processed_messages (consumer, message_id) VALUES ('a', 'b')",
        f"DELETE FROM {there}outbox_partition",
        f"DELETE FROM {there}outbox_pause",
        f"SELECT id FROM {there}failed_messages",
    )


# The operator


def test_an_operator_looks_retries_discards_and_pauses(place: Place) -> None:
    died = {"state": State.DEAD, "dead_at": datetime.now(UTC), "attempts": 20, "error_class": "Unroutable", "last_error": "no"}
    first, second = insert_into(place, "1", "2", holds=True, **died)
    insert_into(place, "2", state=State.BLOCKED, holds=True)

    def command(*words: str) -> str:
        names = [str(each) for each in words]
        result = CliRunner().invoke(main, [*names, *place.arguments("operator")], catch_exceptions=False)
        assert result.exit_code == 0, result.output
        return result.stdout

    assert json.loads(command("status", "--json"))["messages"]["dead"] == 2
    assert str(first) in command("messages", "list")
    assert "payload" in command("messages", "show", first)
    assert "Unroutable" in command("dead", "list")
    assert "Unroutable" in command("dead", "show", first)
    assert "retried 1" in command("dead", "retry", first, "--yes")
    assert "discarded 1" in command("dead", "discard", second, "--yes")
    assert "paused" in command("pause", "orders.#")
    place.write(sa.update(place.tables.message).values(state=State.BLOCKED, holds=True))
    assert "resumed, 2" in command("resume", "orders.#")
    assert "ok" in command("schema", "verify")
    assert [row.state for row in place.rows()] == ["pending", "pending"]


@in_a_schema
def test_an_operator_may_not_change_what_a_message_says_nor_forget_what_was_handled(place: Place) -> None:
    there = '"my events".'
    refused(
        place.url("operator"),
        f"UPDATE {there}outbox_message SET payload = ''",
        f"UPDATE {there}outbox_message SET key = 'x'",
        f"INSERT INTO {there}outbox_message (topic) VALUES ('x')",
        f"DELETE FROM {there}processed_messages",
        f"DELETE FROM {there}failed_messages",
        f"TRUNCATE {there}outbox_message",
        f"DROP TABLE {there}outbox_message",
    )


def test_two_parts_may_be_one_role() -> None:
    printed = CliRunner().invoke(main, ["schema", "grants", "--relay", "shop", "--operator", "shop", "--create-roles"]).stdout

    assert printed.count("CREATE ROLE shop ") == 1
    assert printed.count(" TO shop;") == 5 + 6


def schema_of(place: Place) -> list[str]:
    return place.arguments("relay")[2:]


def insert_into(place: Place, *keys: str, **values: Any) -> list[Any]:
    """As `tests.rows.insert`, in whatever schema the tables are."""
    engine = place.engine.execution_options(schema_translate_map={None: place.tables.schema})
    return insert(engine, *keys, **values)


def count(place: Place, state: State) -> int:
    return sum(row.state == state for row in place.rows())


def presence(place: Place) -> bool:
    """Tell whether a relay's session holds its lock."""
    query = (
        "SELECT count(*) FROM pg_locks JOIN pg_stat_activity USING (pid) WHERE locktype = 'advisory' AND granted"
        " AND application_name = 'outbox-relay-presence' AND pg_stat_activity.datname = current_database()"
    )
    with place.engine.connect() as connection:
        return connection.exec_driver_sql(query).scalar_one() == 1
