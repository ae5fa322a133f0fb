"""What relays and consumers tell while they work, and that nobody who listens can change what they do."""

import logging
from contextvars import ContextVar
from dataclasses import fields, is_dataclass

import pytest
import sqlalchemy as sa
from sqlalchemy.exc import OperationalError
from sqlalchemy.ext.asyncio import async_sessionmaker, create_async_engine
from sqlalchemy.orm import sessionmaker

from outbox import Inbox, Message, clock, mention
from outbox import telemetry as catalogue
from outbox.backoff import Backoff
from outbox.errors import BrokerUnavailable
from outbox.inbox.limits import Guard
from outbox.inbox.processing import processing
from outbox.inbox.receiving import Receiver, Work
from outbox.observe.logs import logged
from outbox.policies import Policies
from outbox.publishers.flight import CONFIRMED
from outbox.publishers.memory import MemoryPublisher
from outbox.relay import Relay, Transactions
from outbox.relay.cleanup import Cleanup
from outbox.states import Outcome, RetryPolicy, State, Verdict
from outbox.tables import DEFAULT
from outbox.telemetry import (
    BatchClaimed,
    BatchFenced,
    BatchPublished,
    BatchSettled,
    BreakerChanged,
    BrokerStateChanged,
    CleanedUp,
    DatabaseStateChanged,
    DuplicateDropped,
    HandlingBegan,
    HandlingEnded,
    LeaseRenewed,
    MessageDied,
    MessageHandled,
    MessageRetried,
    PublishBegan,
    PublishFailed,
    PublishGivenUp,
    Telemetry,
    TelemetryEvent,
    bus,
)
from tests.rows import insert, partition, states
from tests.unit.test_relay_memory import Pauses

REJECTED = Verdict(Outcome.REJECTED, "unroutable", "Unroutable")
UNPUBLISHABLE = Verdict(Outcome.UNPUBLISHABLE, "too large", "TooLarge")
TRACE = "0af7651916cd43dd8448eb211c80319c"
TRACEPARENT = f"00-{TRACE}-b7ad6b7169203331-01"
EVENTS = [getattr(catalogue, name) for name in catalogue.__all__ if name not in ("Subscriber", "Telemetry", "TelemetryEvent")]


@pytest.fixture
def told():
    return []


def kinds(told):
    return [type(event) for event in told]


def only(told, kind):
    return [event for event in told if type(event) is kind]


def relay(engine, publisher, telemetry, *, pauses=1, lease_s=30, wrong=lambda _transactions: None):
    """Run a relay until it has paused so often."""
    policy = RetryPolicy(backoff=Backoff(first_s=3600, ceiling_s=3600, floor=1))
    transactions = Transactions(engine, DEFAULT, owner="relay", lease_s=lease_s, batch_size=100, policies=Policies(policy))
    wrong(transactions)
    stopping = Pauses(lambda taken: len(taken) >= pauses)
    Relay(transactions, publisher, stopping, lease_s=lease_s, poll_interval_s=0.5, telemetry=telemetry).run()


# The catalogue


@pytest.mark.parametrize("event", EVENTS)
def test_an_event_is_a_frozen_dataclass_that_says_when_it_fires(event):
    assert is_dataclass(event)
    assert event.__dataclass_params__.frozen
    assert issubclass(event, TelemetryEvent)
    assert not event.__doc__.startswith(event.__name__), "written by hand"
    assert not {"payload", "body"} & {field.name for field in fields(event)}


def test_no_event_shows_payloads_or_headers_when_it_is_printed(engine, told):
    insert(engine, "a", payload=b"hidden-payload", headers={"x": "hidden-header"})
    insert(engine, "b", payload=b"hidden-payload", headers={"x": "hidden-header"})
    relay(engine, MemoryPublisher(lambda row: REJECTED if row.key == "a" else CONFIRMED), Telemetry(told.append))

    assert {PublishBegan, BatchPublished, PublishFailed} <= set(kinds(told))
    assert "hidden" not in repr(told)


# The bus


class Clock:
    now = 0.0

    def seconds(self):
        return self.now


@pytest.mark.parametrize("error", [RuntimeError("mine"), SystemExit(1), KeyboardInterrupt()])
def test_a_subscriber_that_raises_is_logged_once_a_minute_for_each_kind_and_the_others_are_told(monkeypatch, caplog, told, error):
    time = Clock()
    monkeypatch.setattr(bus, "clock", time)

    def fail(_event):
        raise error

    telemetry = Telemetry(fail, told.append)
    for _ in range(100):
        telemetry.emit(BatchFenced(1))
        telemetry.emit(CleanedUp("relays", 1))
    assert len(told) == 200
    assert [record.event for record in caplog.records] == ["BatchFenced", "CleanedUp"]
    assert caplog.records[0].exc_info[1] is error
    time.now += bus.COMPLAIN_EVERY_S
    telemetry.emit(BatchFenced(1))

    assert len(caplog.records) == 3


# A relay


def test_a_batch_is_told_from_the_claim_to_the_settle(engine, told):
    insert(engine, "a", "b", "a")
    publisher = MemoryPublisher()
    relay(engine, publisher, Telemetry(told.append), pauses=3)

    assert kinds(told)[:2] == [BrokerStateChanged, BatchClaimed]
    claimed, (began,), (published,), (settled,) = (
        only(told, kind) for kind in (BatchClaimed, PublishBegan, BatchPublished, BatchSettled)
    )
    assert sum(event.messages for event in claimed) == 3
    assert list(began.rows) == list(published.rows)
    assert published.outcomes() == {("orders.placed", Outcome.CONFIRMED): 3}
    assert settled.states == {State.SENT: 3}
    assert settled.first_failure is None
    assert all(0 <= latency < 60 for latency in published.latencies_s())
    assert len(published.latencies_s()) == 3
    assert kinds(told).index(BatchPublished) < kinds(told).index(BatchSettled)


def test_a_look_that_finds_nothing_tells_nothing(engine, told):
    relay(engine, MemoryPublisher(), Telemetry(told.append), pauses=20)

    assert kinds(told) == [BrokerStateChanged]


def test_each_message_that_fails_is_told_and_the_batch_says_the_first(engine, told):
    bad, worse, _good = insert(engine, "a", "b", "c", headers={"traceparent": TRACEPARENT})
    verdicts = {bad: REJECTED, worse: UNPUBLISHABLE}
    relay(engine, MemoryPublisher(lambda row: verdicts.get(row.message_id, CONFIRMED)), Telemetry(told.append))

    (failed,), (given_up,), (settled,) = (only(told, kind) for kind in (PublishFailed, PublishGivenUp, BatchSettled))
    assert (failed.message_id, failed.attempts, failed.reason, failed.error_class) == (bad, 1, "unroutable", "Unroutable")
    assert failed.retry_in_s == 3600
    assert (given_up.message_id, given_up.topic, given_up.reason) == (worse, "orders.placed", "too large")
    assert settled.states == {State.SENT: 1, State.SCHEDULED: 1, State.DEAD: 1}
    assert settled.first_failure in (failed, given_up)


def test_a_relay_that_is_fenced_tells_that_and_nothing_of_the_messages(engine, told):
    insert(engine, "a")

    def lose_the_lease(_row):
        with engine.begin() as connection:
            connection.execute(partition.update().values(lease_token=partition.c.lease_token + 1))
        return REJECTED

    relay(engine, MemoryPublisher(lose_the_lease), Telemetry(told.append))

    assert only(told, BatchFenced) == [BatchFenced(1)]
    assert only(told, PublishFailed) == []


def test_a_lease_that_is_renewed_is_told(engine, told, monkeypatch):
    now, later = clock.seconds, [0.0]
    monkeypatch.setattr(clock, "seconds", lambda: now() + later[0])

    def takes_long(_row):
        later[0] += 11
        return CONFIRMED

    insert(engine, "a")
    relay(engine, MemoryPublisher(takes_long), Telemetry(told.append), lease_s=30)

    assert only(told, LeaseRenewed) == [LeaseRenewed(asked=1, held=1)]
    (published,) = only(told, BatchPublished)
    assert 11 <= published.seconds <= published.since_claim_s < 12
    assert all(11 <= latency < 12 for latency in published.latencies_s())


class Away(MemoryPublisher):
    """Cannot be reached for so many tries, then blocks once."""

    def __init__(self, tries):
        super().__init__()
        self.tries = tries
        self.looks = 0

    def connect(self):
        if self.tries:
            self.tries -= 1
            raise BrokerUnavailable("nobody listens")

    @property
    def blocked(self):
        self.looks += 1
        return self.looks <= 3


def test_the_broker_is_told_as_it_changes_and_no_more_often(engine, told):
    insert(engine, "a")
    relay(engine, Away(5), Telemetry(told.append), pauses=10)

    assert [event.state for event in only(told, BrokerStateChanged)] == ["unreachable", "blocked", "connected"]
    breaker = only(told, BreakerChanged)
    assert [event.open for event in breaker] == [True, False]
    assert str(breaker[0].error) == "nobody listens"


def test_the_database_is_told_when_it_fails_and_when_it_is_back(engine, told):
    insert(engine, "a")

    def fail_twice(transactions):
        left, claim = [1, 1], transactions.claim

        def failing():
            if left:
                left.pop()
                raise OperationalError("SELECT", {}, Exception("the database system is shutting down"))
            return claim()

        transactions.claim = failing

    relay(engine, MemoryPublisher(), Telemetry(told.append), pauses=5, wrong=fail_twice)

    assert [event.up for event in only(told, DatabaseStateChanged)] == [False, True]


def test_cleaning_up_is_told(engine, told):
    with engine.begin() as connection:
        connection.execute(DEFAULT.processed.insert().values(consumer="a", message_id="b"))
    now = [0.0]
    cleanup = Cleanup(
        engine, DEFAULT, retention_s=None, inbox_retention_s=-60, clock=lambda: now[0], telemetry=Telemetry(told.append)
    )
    for _ in range(4):
        cleanup.turn()
        now[0] += 100

    assert told == [CleanedUp("processed", 1)]


# A consumer


@pytest.fixture
def inbox(engine):
    inbox = Inbox("shipping", sessions=sessionmaker(engine))

    @inbox.transactional("orders.*", retry=RetryPolicy(max_attempts=1))
    def handle(_session, message):
        if message.payload == b"bad":
            raise ValueError("bad")

    @inbox.transactional("letters.*")
    def again(_session, _message):
        raise ValueError("again")

    return inbox


def receive(inbox, telemetry, message_id, topic="orders.placed", payload=b"{}"):
    message = Message(message_id, topic, payload, headers={"traceparent": TRACEPARENT})
    return Receiver(inbox, telemetry).receive(Work(message), Guard())


def test_a_message_is_told_when_its_handling_begins_ends_and_what_came_of_it(inbox, told):
    receive(inbox, Telemetry(told.append), "a")
    receive(inbox, Telemetry(told.append), "a")

    assert kinds(told) == [HandlingBegan, HandlingEnded, MessageHandled, HandlingBegan, HandlingEnded, DuplicateDropped]
    began, ended, handled, _, second, _ = told
    assert (began.consumer, began.message_id, began.topic, began.handler) == ("shipping", "a", "orders.placed", "orders.*")
    assert began.headers["traceparent"] == TRACEPARENT
    assert (ended.ran, ended.error, second.ran) == (True, None, False)
    assert 0 <= ended.seconds < 60
    assert handled.handler == "orders.*"


def test_a_failure_is_told_with_its_error_and_what_follows(inbox, told):
    receive(inbox, Telemetry(told.append), "a", payload=b"bad")
    receive(inbox, Telemetry(told.append), "b", topic="letters.sent")
    receive(inbox, Telemetry(told.append), "c", topic="unknown")

    assert kinds(told) == [
        HandlingBegan,
        HandlingEnded,
        MessageDied,
        HandlingBegan,
        HandlingEnded,
        MessageRetried,
        MessageRetried,
    ]
    (died,), (again, unhandled) = only(told, MessageDied), only(told, MessageRetried)
    assert (died.attempts, str(died.error), died.reason, died.explained) == (1, "bad", "bad", False)
    assert again.retry_in_s > 0
    assert unhandled.explained
    assert told[1].error is died.error


# Whoever listens decides nothing


def raising(_event):
    raise RuntimeError("mine")


def test_a_listener_that_raises_in_every_event_changes_no_messages_fate(engine, inbox):
    inserted = insert(engine, *"abcd")
    verdicts = {inserted[0]: REJECTED, inserted[1]: UNPUBLISHABLE}
    publisher = MemoryPublisher(lambda row: verdicts.get(row.message_id, CONFIRMED))
    relay(engine, publisher, Telemetry(raising))
    for name, payload in (("a", b"{}"), ("a", b"{}"), ("b", b"bad")):
        receive(inbox, Telemetry(raising), name, payload=payload)

    assert sorted(states(engine)) == ["dead", "scheduled"]
    assert {row.message_id for row in publisher.published} == set(inserted[2:])
    with engine.connect() as connection:
        assert connection.execute(sa.select(DEFAULT.processed.c.message_id)).scalars().all() == ["a"]
        assert connection.execute(sa.select(DEFAULT.failed.c.message_id, DEFAULT.failed.c.state)).all() == [("b", "dead")]


# The log


def test_failures_are_logged_with_the_message_that_they_are_about(engine, caplog, inbox):
    bad, worse = insert(engine, "a", "b", headers={"traceparent": TRACEPARENT})
    verdicts = {bad: REJECTED, worse: UNPUBLISHABLE}
    relay(engine, MemoryPublisher(lambda row: verdicts[row.message_id]), logged())
    receive(inbox, logged(), "c", payload=b"bad")

    of_relay, of_inbox = ([r for r in caplog.records if r.name == name] for name in ("outbox.relay", "outbox.inbox"))
    given_up, batch = of_relay
    assert (given_up.getMessage(), given_up.levelno, given_up.message_id) == ("message given up", logging.ERROR, str(worse))
    assert (batch.getMessage(), batch.will_retry, batch.dead) == ("messages not published", 1, 1)
    (died,) = of_inbox
    assert (died.message_id, died.exc_info[0]) == ("c", ValueError)
    assert {record.trace_id for record in caplog.records} == {TRACE}


def test_a_flood_of_failures_is_said_in_a_few_lines_that_say_how_many_were_left_out(engine, caplog):
    insert(engine, *[None] * 1000)
    relay(engine, MemoryPublisher(lambda _row: UNPUBLISHABLE), logged(), pauses=3)

    assert set(states(engine)) == {"dead"}
    assert len(caplog.records) <= 40
    assert "message given up" in caplog.text


@pytest.mark.parametrize("kind", ["plain", "async"])
def test_what_a_listener_sets_and_the_message_itself_are_known_in_the_handler(tmp_path, engine, kind):
    """A listener to `HandlingBegan` may set a context variable, as tracing does, whichever kind of handler it is."""
    seen, mark = [], ContextVar("mark", default="none")

    def look():
        seen.append((mark.get(), mention.current().get("message_id")))

    if kind == "plain":
        inbox = Inbox("shipping", sessions=sessionmaker(engine))
        inbox.transactional("#")(lambda _session, _message: look())
    else:
        inbox = Inbox("shipping", sessions=async_sessionmaker(create_async_engine(f"sqlite+aiosqlite:///{tmp_path}/outbox.db")))

        @inbox.transactional("#")
        async def handle(_session, _message):
            look()

    message = Message("m-1", "orders.placed", b"{}")
    telemetry = Telemetry(lambda event: mark.set("set") if isinstance(event, HandlingBegan) else None)
    with processing(inbox) as run, mention.mentioned(message):
        run(Receiver(inbox, telemetry).receive, Work(message), Guard())

    assert seen == [("set", "m-1")]
