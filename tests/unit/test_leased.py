"""`leased` on SQLite: who holds a message, what is kept of it, and what a worker hears that has lost it."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy.exc import OperationalError
from sqlalchemy.orm import Session, scoped_session, sessionmaker

import outbox
from outbox import clock
from outbox.errors import ConfigurationError, NoTransaction
from outbox.inbox import Busy, InvalidResult, Lease, LeaseLost, Unfinished, leased, once
from outbox.inbox.errors import InvalidMessageId
from outbox.inbox.lease_record import LeaseRecord
from outbox.inbox.retention import forget
from outbox.sqltypes import later
from outbox.tables import DEFAULT

processed = DEFAULT.processed
payments = sa.Table("payments", sa.MetaData(), sa.Column("charge", sa.Text))
Sessions = sessionmaker[Session]


@pytest.fixture
def sessions(tmp_path: Path) -> Iterator[Sessions]:
    engine = sa.create_engine(f"sqlite:///{tmp_path}/app.db", connect_args={"timeout": 0.1})
    outbox.metadata.create_all(engine)
    payments.metadata.create_all(engine)
    yield sessionmaker(engine)
    engine.dispose()


def lease(sessions: Sessions, message_id: str = "m-1", **options: Any) -> Any:
    return leased(sessions, "payments", message_id, **options)


def record(sessions: Sessions) -> sa.RowMapping:
    with sessions() as session:
        return session.execute(sa.select(processed)).mappings().one()


def run_out(sessions: Sessions, *, ago_s: float = 1.0) -> None:
    """Let the lease end, as time does."""
    with sessions.begin() as session:
        ended = sa.update(processed).where(processed.c.state == "processing").values(lease_until=later(sa.literal(-ago_s)))
        session.execute(ended)


@contextmanager
def lost(sessions: Sessions) -> Iterator[Lease]:
    """A lease whose block ends with `LeaseLost`."""
    with pytest.raises(LeaseLost, match="another worker"), lease(sessions) as old:
        yield old


def test_the_first_gets_a_lease_and_every_later_one_the_result(sessions: Sessions) -> None:
    with lease(sessions) as first:
        assert (first.first, first.token, first.result) == (True, 1, None)
        assert record(sessions)["state"] == "processing"
        first.complete({"charge": "ch_1"})
    for _ in range(2):
        with lease(sessions) as again:
            assert (again.first, again.result) == (False, {"charge": "ch_1"})


def test_a_block_that_just_ends_completes_without_a_result(sessions: Sessions) -> None:
    with lease(sessions):
        pass
    assert (record(sessions)["state"], record(sessions)["result"]) == ("done", None)
    with lease(sessions) as again:
        assert (again.first, again.result) == (False, None)


def test_while_one_holds_it_another_is_told_for_how_long(sessions: Sessions) -> None:
    with lease(sessions, lease_s=50), pytest.raises(Busy) as busy, lease(sessions):
        pytest.fail("two at once")
    assert busy.value.retry_after_s == pytest.approx(50, abs=10)


def test_other_messages_and_consumers_are_not_held_up(sessions: Sessions) -> None:
    with lease(sessions), lease(sessions, "m-2") as other, leased(sessions, "mail", "m-1") as mail:
        assert other.first
        assert mail.first


def test_an_exception_gives_the_message_to_the_next_at_once(sessions: Sessions) -> None:
    with pytest.raises(KeyError, match="mine"), lease(sessions) as first:
        raise KeyError("mine")
    with lease(sessions) as second:
        assert second.first
        assert second.token > first.token


def test_what_has_run_out_is_taken_over_and_the_old_worker_can_write_nothing(sessions: Sessions) -> None:
    with lost(sessions) as old:
        run_out(sessions)
        with lease(sessions) as new:
            assert new.token == old.token + 1
            with pytest.raises(LeaseLost):
                old.complete("late")
            new.complete("in time")
    assert record(sessions)["result"] == "in time"


def test_a_worker_whose_message_was_taken_over_and_completed_cannot_complete_it_again(sessions: Sessions) -> None:
    with lost(sessions):
        run_out(sessions)
        with lease(sessions) as new:
            new.complete("in time")
    assert record(sessions)["result"] == "in time"


def test_an_old_worker_that_fails_does_not_give_the_lease_of_the_new_one_back(sessions: Sessions) -> None:
    old = lease(sessions)
    old.__enter__()
    run_out(sessions)
    with lease(sessions) as new:
        assert not old.__exit__(ValueError, ValueError(), None)
        with pytest.raises(Busy):
            lease(sessions).__enter__()
        new.complete()


def test_a_lease_that_ran_out_and_that_nobody_took_can_still_be_completed(sessions: Sessions) -> None:
    with lease(sessions) as first:
        run_out(sessions)
        first.complete("ok")
    assert record(sessions)["result"] == "ok"


def test_a_renewal_that_arrives_after_the_release_brings_nothing_back(sessions: Sessions) -> None:
    with pytest.raises(ValueError, match="mine"), lease(sessions) as first:
        raise ValueError("mine")
    assert not first._hold.record.renew(first.token)
    with lease(sessions) as second:
        assert second.first


def test_after_the_block_nothing_can_be_written(sessions: Sessions) -> None:
    with pytest.raises(ValueError, match="mine"), lease(sessions) as first:
        raise ValueError("mine")
    for call in (first.progress, first.complete):
        with pytest.raises(LeaseLost, match="ended"):
            call()
    assert record(sessions)["state"] == "processing"


def test_there_is_no_lease_on_what_is_done(sessions: Sessions) -> None:
    with lease(sessions):
        pass
    with lease(sessions) as again:
        for call in (again.progress, again.complete):
            with pytest.raises(LeaseLost, match="done already"):
                call()


def test_own_clock_past_the_lease_says_that_it_may_be_lost(sessions: Sessions, monkeypatch: pytest.MonkeyPatch) -> None:
    with lease(sessions, lease_s=60) as first:
        first.progress()
        now = clock.seconds()
        monkeypatch.setattr(clock, "seconds", lambda: now + 60)  # as after a suspend
        with pytest.raises(LeaseLost, match="own clock"):
            first.progress()
        monkeypatch.undo()
        first.complete()


class TestCompletingInASession:
    def test_what_is_written_beside_it_commits_with_it(self, sessions: Sessions) -> None:
        with lease(sessions) as first, sessions.begin() as session:
            session.execute(payments.insert().values(charge="ch_1"))
            first.complete("ch_1", session=session)
        assert record(sessions)["result"] == "ch_1"
        assert charges(sessions) == ["ch_1"]

    def test_what_is_written_beside_it_is_undone_when_the_lease_is_lost(self, sessions: Sessions) -> None:
        with lost(sessions) as old:
            run_out(sessions)
            with lease(sessions) as new:
                new.complete("in time")
            with sessions.begin() as session:
                session.execute(payments.insert().values(charge="late"))
                old.complete("late", session=session)
        assert record(sessions)["result"] == "in time"
        assert charges(sessions) == []

    def test_rolled_back_with_an_exception_the_message_is_given_back(self, sessions: Sessions) -> None:
        def fail(first: Lease) -> None:
            with sessions.begin() as session:
                first.complete("ch_1", session=session)
                raise ValueError("mine")

        with pytest.raises(ValueError, match="mine"), lease(sessions) as first:
            fail(first)
        with lease(sessions) as second:
            assert second.first

    def test_a_transaction_that_nobody_committed_is_an_error(self, sessions: Sessions) -> None:
        with pytest.raises(NoTransaction, match="commit it inside"), lease(sessions) as first, sessions() as session:
            first.complete("ch_1", session=session)
        with lease(sessions) as second:
            assert second.first

    def test_a_connection_and_a_scoped_session_will_do(self, sessions: Sessions) -> None:
        with lease(sessions) as first, sessions.kw["bind"].begin() as connection:
            first.complete(1, session=connection)
        scoped = scoped_session(sessions)
        with lease(sessions, "m-2") as second:
            second.complete(2, session=scoped)
            scoped.commit()
        scoped.remove()

    def test_outside_a_transaction_it_is_refused(self, sessions: Sessions) -> None:
        with lease(sessions) as first, sessions.kw["bind"].connect() as connection:
            with pytest.raises(NoTransaction):
                first.complete(1, session=connection)
            first.complete(2)
        assert record(sessions)["result"] == 2


def charges(sessions: Sessions) -> list[str]:
    with sessions() as session:
        return list(session.scalars(sa.select(payments.c.charge)))


def test_completing_twice_changes_nothing(sessions: Sessions) -> None:
    with lease(sessions) as first:
        first.complete("first")
        first.complete("second")
    assert record(sessions)["result"] == "first"


def test_completing_again_after_an_unheard_commit_is_no_loss(sessions: Sessions, monkeypatch: pytest.MonkeyPatch) -> None:
    write = LeaseRecord.complete

    def unheard(self: LeaseRecord, token: int, result: Any) -> bool:
        write(self, token, result)
        raise OperationalError("COMMIT", {}, Exception("connection lost"))

    with lease(sessions) as first:
        monkeypatch.setattr(LeaseRecord, "complete", unheard)
        with pytest.raises(OperationalError):
            first.complete("ch_1")
        monkeypatch.undo()
        assert first._hold.renew() is False
        first.complete("ch_1")
    assert record(sessions)["result"] == "ch_1"


def test_a_failed_release_is_logged_and_does_not_hide_the_error(
    sessions: Sessions, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(self: LeaseRecord, token: int) -> None:
        raise OperationalError("UPDATE", {}, Exception("connection lost"))

    monkeypatch.setattr(LeaseRecord, "release", fail)
    with pytest.raises(KeyError, match="mine"), lease(sessions):
        raise KeyError("mine")
    assert "lease not given back" in caplog.text


class TestResult:
    @pytest.mark.parametrize(
        ("result", "kept"),
        [
            ({"amount": Decimal("29.90")}, {"amount": "29.90"}),
            ([1, None, True, "é", {"a": {}}], [1, None, True, "é", {"a": {}}]),
            ("\\u0000", "\\u0000"),  # a backslash, no NUL
            (0, 0),
            (None, None),
        ],
    )
    def test_it_is_kept_as_json(self, sessions: Sessions, result: object, kept: object) -> None:
        with lease(sessions) as first:
            first.complete(result)
        with lease(sessions) as again:
            assert again.result == kept

    @pytest.mark.parametrize("bad", [object(), b"x", float("nan"), {"a": "\0"}, "\\\0", "\ud800", {1, 2}])
    def test_what_cannot_be_kept_is_an_error_and_the_lease_stays(self, sessions: Sessions, bad: object) -> None:
        with lease(sessions) as first:
            with pytest.raises(InvalidResult, match="the handler's result"):
                first.complete(bad)
            first.complete("good")
        assert record(sessions)["result"] == "good"


class TestIdempotencyKey:
    def key(self, sessions: Sessions, consumer: str, message_id: str) -> str:
        with leased(sessions, consumer, message_id) as lease:
            return lease.idempotency_key

    def test_it_names_consumer_and_message(self, sessions: Sessions) -> None:
        assert self.key(sessions, "payments", "0198-a") == "payments:0198-a"

    def test_it_is_the_same_again(self, sessions: Sessions) -> None:
        assert len({self.key(sessions, "payments", "m 1") for _ in range(2)}) == 1

    def test_names_that_are_no_plain_words_are_hashed_and_stay_apart(self, sessions: Sessions) -> None:
        names = [("a:b", "c"), ("a", "b:c"), ("a b", "c"), ("ü", "\r\n"), ("a" * 255, "b" * 255), ("a", "x" * 254)]
        keys = [self.key(sessions, *each) for each in names]
        assert len(set(keys)) == len(names)
        assert all(key.startswith("sha256=") and len(key) == 71 and key.isascii() and key.isprintable() for key in keys)

    def test_the_form_never_changes(self, sessions: Sessions) -> None:
        hashed = "4dc60b7b6cebe594256f71bec4e1a759570076383637745590622f09e6490c2a"  # printf 'payments\\0m/1' | sha256sum
        assert self.key(sessions, "payments", "m/1") == f"sha256={hashed}"


class TestBesideOnce:
    def test_a_message_under_a_lease_is_busy(self, sessions: Sessions) -> None:
        with lease(sessions, lease_s=50):
            with sessions.begin() as session, pytest.raises(Busy) as busy, once(session, "payments", "m-1"):
                pytest.fail("the effect would be had twice, or never")
            assert busy.value.retry_after_s == pytest.approx(50, abs=10)

    def test_a_message_whose_worker_died_is_no_duplicate(self, sessions: Sessions) -> None:
        with lease(sessions):
            run_out(sessions)
            with sessions.begin() as session, pytest.raises(Unfinished), once(session, "payments", "m-1"):
                pytest.fail("the effect would be lost")

    def test_each_drops_what_the_other_has_done(self, sessions: Sessions) -> None:
        with lease(sessions):
            pass
        with sessions.begin() as session, once(session, "payments", "m-1") as first:
            assert not first
        with sessions.begin() as session, once(session, "payments", "m-2") as first:
            assert first
        with lease(sessions, "m-2") as again:
            assert (again.first, again.result) == (False, None)


class TestRetention:
    def forget(self, sessions: Sessions) -> int:
        with sessions.kw["bind"].begin() as connection:
            return forget(connection, "payments", timedelta(days=30))

    def age(self, sessions: Sessions) -> None:
        with sessions.begin() as session:
            session.execute(sa.update(processed).values(processed_at=later(sa.literal(-31.0 * 86400))))

    def test_a_live_lease_keeps_its_record_however_old_it_is(self, sessions: Sessions) -> None:
        with lease(sessions):
            self.age(sessions)
            assert self.forget(sessions) == 0

    def test_what_nobody_came_back_for_is_forgotten_when_its_lease_is_that_old(self, sessions: Sessions) -> None:
        with lost(sessions):
            self.age(sessions)
            run_out(sessions)
            assert self.forget(sessions) == 0
            run_out(sessions, ago_s=31 * 86400)
            assert self.forget(sessions) == 1

    def test_what_is_done_is_as_old_as_its_result(self, sessions: Sessions) -> None:
        with lease(sessions) as first:
            self.age(sessions)
            first.complete()
        assert self.forget(sessions) == 0
        self.age(sessions)
        assert self.forget(sessions) == 1


@pytest.mark.parametrize("bad", [{"lease_s": 0}, {"lease_s": -1}, {"time_limit_s": 0}])
def test_times_that_cannot_work_are_refused_at_the_call(sessions: Sessions, bad: dict[str, float]) -> None:
    with pytest.raises(ConfigurationError):
        lease(sessions, **bad)


def test_names_that_cannot_be_stored_are_refused_at_the_call(sessions: Sessions) -> None:
    with pytest.raises(InvalidMessageId, match="message_id"):
        lease(sessions, "")
    with pytest.raises(InvalidMessageId, match="consumer"):
        leased(sessions, "x" * 256, "m-1")


def test_a_database_that_somebody_else_writes_in_is_busy(sessions: Sessions) -> None:
    with sessions.kw["bind"].connect() as other:
        other.exec_driver_sql("BEGIN IMMEDIATE")
        with pytest.raises(Busy):
            lease(sessions).__enter__()


def test_own_tables(sessions: Sessions) -> None:
    tables = outbox.attach(sa.MetaData())
    with lease(sessions, tables=tables) as first:
        assert isinstance(first, Lease)
        assert (first.consumer, first.message_id) == ("payments", "m-1")


def test_the_heartbeat_says_nothing_when_all_is_well(sessions: Sessions, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING), lease(sessions) as first:
        assert first._hold.renew()
        first.complete()
        assert first._hold.renew()
    assert caplog.text == ""
