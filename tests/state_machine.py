"""A model of the whole outbox that hypothesis plays against: every step that anybody can take, and what must hold after each.

Some relays claim, publish, settle, lose their leases and crash; applications enqueue; operators retry, discard, pause and
resume; time passes. The database is a real one; what is to become due, or to expire, is set so, and nobody waits for it.
"""

from __future__ import annotations

import os
from collections import defaultdict
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import islice
from typing import Any
from uuid import UUID

import pytest
import sqlalchemy as sa
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    initialize,
    invariant,
    multiple,
    precondition,
    rule,
    run_state_machine_as_test,
)

from outbox.backoff import Backoff
from outbox.identity import partition_of
from outbox.outgoing import Outgoing
from outbox.policies import Policies
from outbox.publishers.flight import CONFIRMED, Flight
from outbox.relay import Transactions, cursor, dead, resuming, settling, transactions
from outbox.relay.batch import Batch
from outbox.relay.resuming import Resume
from outbox.states import PARKED, OnDead, Outcome, RetryPolicy, State, Verdict
from outbox.store import pauses
from outbox.store.dead import Selection
from outbox.store.dead import find as find_dead
from outbox.tables import DEFAULT
from outbox.topics import matches
from tests.rows import insert, message, partition

PAST = datetime(2020, 1, 1, tzinfo=UTC)
FUTURE = datetime(2999, 1, 1, tzinfo=UTC)
NEVER = Backoff(first_s=86_400, ceiling_s=86_400, floor=1)

POLICIES = Policies(by_topic=tuple((each.value, RetryPolicy(max_attempts=2, backoff=NEVER, on_dead=each)) for each in OnDead))
TOPICS = [each.value for each in OnDead]

# Two keys that share a partition, and one elsewhere, in the partition that messages without a key get here.
SHARING = next(key for key in map(str, range(10_000)) if partition_of(key) == partition_of("a"))
PARTITIONS = {"a": partition_of("a"), SHARING: partition_of("a"), "b": partition_of("b"), None: partition_of("b")}
KEYS = ["a", "a", "a", SHARING, "b", None]

ANSWERS = [
    CONFIRMED,
    CONFIRMED,
    Verdict(Outcome.REJECTED, "unroutable", "Unroutable"),
    Verdict(Outcome.REJECTED, "unroutable", "Unroutable"),
    Verdict(Outcome.REFUSED, "nack", "Nack"),
    Verdict(Outcome.UNPUBLISHABLE, "too large", "CannotSerialize"),
    None,  # none comes: it stays on the wire, and is unknown at the end
]

NUMBERS = st.integers(0, 7)
PATTERNS = [*TOPICS, "#"]
SELECTIONS = st.sampled_from([Selection(), *(Selection(topics=topic) for topic in TOPICS), Selection(key="a")])
EVENTS = st.lists(
    st.tuples(st.sampled_from(KEYS), st.sampled_from(TOPICS), st.sampled_from([False, False, False, True])),
    min_size=2,
    max_size=5,
)
LOOKED_AT = [
    message.c[name]
    for name in ("id", "message_id", "key", "topic", "state", "holds", "attempts", "failures", "error_class")
]  # fmt: skip
EXPECTED = {
    Outcome.CONFIRMED: State.SENT,
    Outcome.UNKNOWN: State.PENDING,
    Outcome.UNSENT: State.PENDING,
    Outcome.REFUSED: State.SCHEDULED,
    Outcome.REJECTED: State.SCHEDULED,
    Outcome.UNPUBLISHABLE: State.DEAD,
}
FOLLOWERS = {OnDead.BLOCK: State.BLOCKED, OnDead.SKIP: State.PENDING, OnDead.PARK: State.DEAD}


@dataclass(eq=False)
class Enqueued:
    """What the model knows of one message; `place` is its order among all, `free` says that its order is not promised."""

    message_id: UUID
    place: int
    key: str | None
    topic: str
    free: bool = False
    confirmed: bool = False
    gone: bool = False  # sent and settled, or discarded


@dataclass(eq=False)
class UnderWay:
    """A claimed batch on its way to the broker."""

    relay: Transactions
    batch: Batch
    flight: Flight


def play(engine: sa.Engine, monkeypatch: pytest.MonkeyPatch, *, examples: int) -> None:
    """Play so many games on a database; raises `AssertionError` with the shortest game that breaks a promise."""
    # So few at once that something is left for the next time, also in tables as small as these.
    for module, name in ((settling, "_UNBLOCK_AT_ONCE"), (dead, "_UNBLOCK_AT_ONCE"), (dead, "AT_ONCE"), (resuming, "BATCH")):
        monkeypatch.setattr(module, name, 2)
    monkeypatch.setattr(transactions, "_PROMOTE_AT_ONCE", 2)
    monkeypatch.setattr(transactions, "_PROMOTE_EVERY_S", 1e9)  # only by a claim that follows one that found nothing
    monkeypatch.setattr(cursor, "LOOK_EVERY_S", 0.0)
    monkeypatch.setattr(cursor, "SWEEP_EVERY_S", 1e9)
    run_state_machine_as_test(
        lambda: OutboxMachine(engine),
        settings=settings(
            max_examples=examples,
            stateful_step_count=30,
            deadline=None,
            suppress_health_check=list(HealthCheck),
            database=None,
            derandomize="OUTBOX_TEST_EXAMPLES" not in os.environ,  # the suite plays the same games every time
        ),
    )


class OutboxMachine(RuleBasedStateMachine):
    """Plays on the tables behind `engine`, which it empties first."""

    under_way = Bundle("under_way")

    def __init__(self, engine: sa.Engine) -> None:
        super().__init__()
        self.engine = engine
        self.seen: set[str] = set()
        self.enqueued: dict[UUID, Enqueued] = {}
        self.relays = [
            Transactions(
                engine, DEFAULT, owner=f"relay-{size}", lease_s=3600, batch_size=size, policies=POLICIES, keep_sent=keep_sent
            )
            for size, keep_sent in ((3, False), (100, True))
        ]
        with engine.begin() as connection:
            connection.execute(message.delete())
            connection.execute(DEFAULT.pause.delete())
            connection.execute(partition.update().values(lease_owner=None, lease_until=None, lease_token=0, served_at=None))

    # What applications do

    @initialize(events=EVENTS)
    def begin(self, events: list[tuple[str | None, str, bool]]) -> None:
        self.enqueue(events)

    @rule(events=EVENTS)
    def enqueue(self, events: list[tuple[str | None, str, bool]]) -> None:
        with self.engine.begin() as connection:
            for key, topic, delayed in events:
                later = {"state": State.SCHEDULED, "available_at": FUTURE} if delayed else {}
                (one,) = insert(connection, key, topic=topic, partition=PARTITIONS[key], **later)
                self.enqueued[one] = Enqueued(one, len(self.enqueued), key, topic, free=delayed)

    # What relays do

    @precondition(lambda self: self.seen & {State.PENDING, State.SCHEDULED})
    @rule(target=under_way, number=st.integers(0, 1))
    def claim(self, number: int) -> Any:
        pending = {row.id for row in self.rows() if row.state == State.PENDING}
        batch = self.relays[number].claim()
        if batch is None:
            return multiple()
        self.set_aside_as_it_must_be(pending)
        assert {row.partition for row in batch.rows} <= set(batch.leases)
        assert not [row for row in batch.rows if self.enqueued[row.message_id].gone], "what was settled is claimed again"
        return UnderWay(self.relays[number], batch, Flight(batch.rows))

    @rule(one=under_way, answers=st.lists(st.sampled_from(ANSWERS), min_size=1, max_size=6))
    def publish(self, one: UnderWay, answers: list[Verdict | None]) -> None:
        """Publish some of a batch, also when its lease is over: frames may be on their way for long."""
        for answer in answers:
            if not one.flight.waiting:
                return
            if answer is not None and answer.outcome is Outcome.UNPUBLISHABLE:
                one.flight.failed(answer)
                continue
            row = one.flight.sent()
            if answer is CONFIRMED:
                self.confirmed(row)
            if answer is not None:
                one.flight.answered(row, answer)

    @rule(one=consumes(under_way), settles=st.integers(1, 2))
    def settle(self, one: UnderWay, settles: int) -> None:
        """Settle; a second time when the relay does not know whether the first one committed."""
        verdicts = one.flight.end()
        for _ in range(settles):
            held = self.held(one.batch)
            before = self.all_but(held)
            settled = one.relay.settle(one.batch, verdicts)
            mine = [row for row in one.batch.rows if row.partition in held]
            assert settled.fenced == len(one.batch.rows) - len(mine)
            assert self.all_but(held) == before, "a fenced relay wrote"
            for row in mine:
                self.enqueued[row.message_id].gone |= verdicts[row.id] is CONFIRMED
            self.settled_as_judged(mine, verdicts)

    @precondition(lambda self: self.seen & {State.PENDING, State.SCHEDULED})
    @rule(number=st.integers(0, 1), answers=st.lists(st.sampled_from(ANSWERS), min_size=1, max_size=6), later=st.booleans())
    def turn(self, number: int, answers: list[Verdict | None], *, later: bool) -> None:
        """Do all that at once, as a relay does that nothing disturbs; if later, then when all leases and delays are over."""
        if later:
            self.all_become_due()
            self.expire(sa.true())
        one = self.claim(number)
        if isinstance(one, UnderWay):
            self.publish(one, answers)
            self.settle(one, 1)

    @rule(one=under_way)
    def renew(self, one: UnderWay) -> None:
        held = self.held(one.batch)
        assert one.relay.renew(one.batch.leases) == held

    @rule(one=under_way)
    def lease_expires(self, one: UnderWay) -> None:
        self.expire(partition.c.lease_token.in_(one.batch.leases.values()), partition.c.partition.in_(one.batch.leases))

    @rule(one=consumes(under_way))
    def crash(self, one: UnderWay) -> None:
        self.lease_expires(one)

    # What time does

    @precondition(lambda self: State.SCHEDULED in self.seen)
    @rule(number=NUMBERS)
    def one_becomes_due(self, number: int) -> None:
        with self.engine.begin() as connection:
            scheduled = sa.select(message.c.id).where(message.c.state == State.SCHEDULED).order_by(message.c.id)
            ids = connection.execute(scheduled).scalars().all()
            connection.execute(message.update().where(message.c.id == ids[number % len(ids)]).values(available_at=PAST))

    # What operators do

    @precondition(lambda self: State.DEAD in self.seen)
    @rule(selection=SELECTIONS | NUMBERS)
    def retry(self, selection: Selection | int) -> None:
        selection = self.as_selection(selection)
        for one in self.selected(selection):
            one.free = True
        with self.engine.connect() as connection:
            list(dead.retry(connection, DEFAULT, selection))

    @precondition(lambda self: State.DEAD in self.seen)
    @rule(selection=SELECTIONS | NUMBERS)
    def discard(self, selection: Selection | int) -> None:
        selection = self.as_selection(selection)
        for one in self.selected(selection):
            one.free = one.gone = True
        with self.engine.connect() as connection:
            list(dead.discard(connection, DEFAULT, selection))

    @precondition(lambda self: State.PENDING in self.seen)
    @rule(pattern=st.sampled_from(PATTERNS), steps=st.sampled_from([0, 1, 1000]))
    def pause_or_resume(self, pattern: str, steps: int) -> None:
        if pattern in self.paused():
            self.resume(pattern, steps)
            return
        with self.engine.begin() as connection:
            pauses.add(connection, DEFAULT, pattern)

    def resume(self, pattern: str, steps: int) -> None:
        """Resume a topic; with few steps the command is killed on its way."""
        resume = Resume(self.engine, DEFAULT, pattern)
        if resume.begin() and steps >= sum(1 for _ in islice(resume.steps(), steps + 1)):
            resume.finish()

    # What must hold

    @invariant()
    def nothing_is_lost_or_left_alone(self) -> None:
        """Pending is what a claim takes, scheduled what a promotion does, dead what an operator does; blocked is freed.

        The constraints of the tables see to the rest of what a row may be.
        """
        rows, paused = self.rows(), self.paused()
        assert {row.message_id for row in rows} == {one.message_id for one in self.enqueued.values() if not one.gone}
        self.seen = {row.state for row in rows}
        by_key: dict[str | None, list[Any]] = defaultdict(list)
        for row in rows:
            earlier = by_key[row.key]
            if row.state == State.BLOCKED:
                assert row.holds is (row.key is not None)
                ahead = row.key is not None and any(each.holds or each.state == State.PENDING for each in earlier)
                assert ahead or any(matches(pattern, row.topic) for pattern in paused), "blocked by nobody"
            if row.state == State.SCHEDULED and row.failures:
                assert row.holds is (row.key is not None), "a message that backs off holds its key"
            if row.state == State.DEAD and row.key is not None:
                assert row.holds is (row.topic != OnDead.SKIP or row.error_class == PARKED), "a dead message holds its key"
            earlier.append(row)

    def teardown(self) -> None:
        """Let everything get through from now on: nothing is left but dead letters, and what they hold."""
        self.expire(sa.true())
        for pattern in self.paused():
            self.resume(pattern, 1000)
        assert self.paused() == []
        self.drain()
        left = self.rows()
        held = {row.key for row in left if row.state == State.DEAD and row.holds}
        assert all(row.state == State.DEAD or (row.state == State.BLOCKED and row.key in held) for row in left)
        self.retry(Selection())
        self.drain()
        assert self.rows() == []

    # How

    def confirmed(self, row: Outgoing) -> None:
        """Note that the broker has it, and look whether a later one of its key was there before."""
        one = self.enqueued[row.message_id]
        if one.confirmed:
            return
        one.confirmed = True
        if one.key is not None and not one.free:
            overtook = [
                each for each in self.enqueued.values() if each.key == one.key and each.confirmed and each.place > one.place
            ]
            assert not overtook, "a key was published out of order"

    def set_aside_as_it_must_be(self, pending: set[int]) -> None:
        """Look at what a claim has blocked: nothing that should have followed a dead one of its key."""
        holders: dict[str | None, Any] = {}
        for row in self.rows():
            head = holders.get(row.key)
            if head is not None and row.id in pending and row.state == State.BLOCKED:
                assert head.state != State.DEAD or (head.topic != OnDead.PARK and head.error_class != PARKED)
            if row.holds:
                holders.setdefault(row.key, row)

    def all_become_due(self) -> None:
        with self.engine.begin() as connection:
            connection.execute(message.update().where(message.c.state == State.SCHEDULED).values(available_at=PAST))

    def settled_as_judged(self, rows: list[Outgoing], verdicts: dict[int, Verdict]) -> None:
        found = {row.id: row for row in self.rows()}
        failed: dict[str | None, Outgoing] = {}
        for row in rows:
            outcome = verdicts[row.id].outcome
            if outcome is Outcome.HELD:
                head = found[failed[row.key].id]
                expected = FOLLOWERS[OnDead(head.topic)] if head.state == State.DEAD else State.BLOCKED
            else:
                expected = EXPECTED[outcome]
            actual = found[row.id].state if row.id in found else State.SENT
            if outcome is Outcome.REJECTED and row.attempts == 1:
                expected = State.DEAD
            assert actual == expected, f"{outcome} led to {actual}"
            if outcome not in (Outcome.CONFIRMED, Outcome.HELD):
                failed[row.key] = row
            # What a pause set aside in the same claim follows later: when it is resumed, and claimed again.
            if actual == State.DEAD and row.topic == OnDead.PARK and row.key is not None and not self.paused():
                assert not [each for each in found.values() if each.key == row.key and each.state == State.BLOCKED]

    def drain(self) -> None:
        for _ in range(10 * len(self.enqueued) + 10):
            self.all_become_due()
            batch = self.relays[1].claim()
            if batch is None and not any(row.state in (State.SCHEDULED, State.PENDING) for row in self.rows()):
                return
            if batch is not None:
                for row in batch.rows:
                    self.confirmed(row)
                    self.enqueued[row.message_id].gone = True
                self.relays[1].settle(batch, {row.id: CONFIRMED for row in batch.rows})
                self.nothing_is_lost_or_left_alone()
        raise AssertionError("it never came to an end")

    def as_selection(self, which: Selection | int) -> Selection:
        """Return a selection as it is, or that of one dead letter by its number."""
        if isinstance(which, Selection):
            return which
        found = self.selected(Selection())
        return Selection(message_ids=(found[which % len(found)].message_id,))

    def selected(self, selection: Selection) -> list[Enqueued]:
        with self.engine.begin() as connection:
            found = find_dead(connection, DEFAULT, selection, limit=1000)
        return [self.enqueued[row["message_id"]] for row in found]

    def paused(self) -> list[str]:
        """Return what is paused, or was, and has not been resumed to the end."""
        with self.engine.begin() as connection:
            return [pause.topics for pause in pauses.listed(connection, DEFAULT)]

    def held(self, batch: Batch) -> set[int]:
        with self.engine.begin() as connection:
            rows = connection.execute(sa.select(partition).where(partition.c.lease_owner.is_not(None))).all()
        return {row.partition for row in rows if batch.leases.get(row.partition) == row.lease_token}

    def expire(self, *which: sa.ColumnElement[bool]) -> None:
        with self.engine.begin() as connection:
            leased = partition.c.lease_owner.is_not(None)
            connection.execute(partition.update().where(leased, *which).values(lease_until=PAST))

    def rows(self) -> list[Any]:
        with self.engine.begin() as connection:
            unsent = sa.select(*LOOKED_AT).where(message.c.state != State.SENT).order_by(message.c.id)
            rows = list(connection.execute(unsent))
        for row in rows:
            if row.state == State.DEAD and row.topic == OnDead.SKIP:
                self.enqueued[row.message_id].free = True  # its key went on without it
        return rows

    def all_but(self, partitions: set[int]) -> list[Any]:
        """Return everything that is in both tables outside of these partitions."""
        with self.engine.begin() as connection:
            tables = [sa.select(table).order_by(*table.primary_key) for table in (message, partition)]
            return [tuple(row) for table in tables for row in connection.execute(table) if row.partition not in partitions]
