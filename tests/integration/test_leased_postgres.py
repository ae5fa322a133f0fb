"""Leases on PostgreSQL: workers that stop, die and hang, a database that goes away, and many workers at once."""

import asyncio
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import datetime
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy.ext.asyncio import async_sessionmaker, create_async_engine
from sqlalchemy.orm import Session, sessionmaker

import outbox
from outbox.inbox import Busy, Lease, LeaseLost, leased, once
from outbox.points import Point
from outbox.sqltypes import later, now
from outbox.tables import DEFAULT
from tests.faults.processes import Program
from tests.faults.stopped import stopping_at, wait_until_stopped, wake
from tests.integration.consuming import WAIT_S, until
from tests.integration.provider import Provider, provider
from tests.servers.postgres import Postgres

processed = DEFAULT.processed
Sessions = sessionmaker[Session]


@pytest.fixture
def engine(database_url: str) -> Iterator[sa.Engine]:
    engine = sa.create_engine(database_url, pool_size=20)
    outbox.metadata.create_all(engine)
    yield engine
    engine.dispose()


@pytest.fixture
def sessions(engine: sa.Engine) -> Sessions:
    return sessionmaker(engine)


def lease(sessions: Sessions, **options: Any) -> Any:
    return leased(sessions, "payments", "m-1", **options)


@contextmanager
def lost(sessions: Sessions, **options: Any) -> Iterator[Lease]:
    """A lease whose block ends with `LeaseLost`."""
    with pytest.raises(LeaseLost), lease(sessions, **options) as old:
        yield old


def taken_over(sessions: Sessions) -> bool:
    try:
        with lease(sessions) as new:
            new.complete("in time")
    except Busy:
        return False
    return True


def record(engine: sa.Engine) -> sa.RowMapping:
    with engine.connect() as connection:
        return connection.execute(sa.select(processed)).mappings().one()


def renewals(engine: sa.Engine) -> Callable[[], float]:
    """How far the lease reaches beyond what it did at first, in seconds."""
    first: datetime = record(engine)["lease_until"]

    def reaches_s() -> float:
        return (record(engine)["lease_until"] - first).total_seconds()

    return reaches_s


def wait_until_someone_waits_for_a_lock(engine: sa.Engine) -> None:
    query = sa.text("SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'")

    def waits() -> bool:
        with engine.connect() as connection:
            return connection.execute(query).scalar_one() > 0

    until(waits)


class TestProcesses:
    @pytest.fixture
    def provider(self) -> Iterator[Provider]:
        with provider() as running:
            yield running

    def worker(self, name: str, database_url: str, provider: Provider) -> Program:
        environment = {"OUTBOX_DATABASE_URL": database_url, "PROVIDER_URL": provider.url}
        return Program(name, ["-m", "tests.integration.paying"], environment)

    @pytest.mark.parametrize("point", [Point.AFTER_LEASE, Point.BEFORE_COMPLETE])
    def test_a_worker_that_sleeps_past_its_lease_changes_nothing_when_it_wakes(
        self, engine: sa.Engine, database_url: str, provider: Provider, point: Point
    ) -> None:
        sleeper = stopping_at(point, 1, self.worker("sleeper", database_url, provider))
        with sleeper:
            wait_until_stopped(sleeper)
            with self.worker("other", database_url, provider) as other:
                assert other.process.wait(WAIT_S) == 0, other.log
                assert "said: handled" in other.log
            done = record(engine)
            wake(sleeper)
            assert sleeper.process.wait(WAIT_S) == 0, sleeper.log
            assert "said: lease lost" in sleeper.log
        assert record(engine) == done
        assert (done["state"], done["token"], done["result"]) == ("done", 2, {"id": "ch_0", "amount": 2990})
        assert provider.requests == ["payments:m-1"] * 2
        assert len(provider.charges) == 1

    def test_a_worker_that_is_killed_between_effect_and_result_leaves_both_to_the_next(
        self, engine: sa.Engine, database_url: str, provider: Provider
    ) -> None:
        killed = stopping_at(Point.BEFORE_COMPLETE, 1, self.worker("killed", database_url, provider))
        with killed:
            wait_until_stopped(killed)
            assert len(provider.charges) == 1
            killed.kill()
            assert killed.process.returncode == -signal.SIGKILL
        with self.worker("next", database_url, provider) as following:
            assert following.process.wait(WAIT_S) == 0, following.log
            assert "said: handled" in following.log
        assert record(engine)["result"] == {"id": "ch_0", "amount": 2990}
        assert provider.requests == ["payments:m-1"] * 2
        assert len(provider.charges) == 1


def test_a_database_that_is_away_for_a_moment_costs_no_lease(own_postgres: Postgres, caplog: pytest.LogCaptureFixture) -> None:
    engine = sa.create_engine(own_postgres.create_database())
    looking = sa.create_engine(engine.url, poolclass=sa.NullPool)
    outbox.metadata.create_all(engine)
    with lease(sessionmaker(engine), lease_s=9) as first:
        reaches_s = renewals(looking)
        own_postgres.stop()
        until(lambda: "lease not renewed, trying again" in caplog.text)
        own_postgres.start()
        until(lambda: reaches_s() > 0)
        first.progress()
        first.complete("ok")
    assert record(looking)["result"] == "ok"
    assert record(looking)["token"] == 1
    engine.dispose()


def test_a_handler_that_makes_no_progress_loses_its_lease(engine: sa.Engine, sessions: Sessions) -> None:
    with lost(sessions, lease_s=0.4, time_limit_s=0.2) as hung:
        until(lambda: taken_over(sessions))
        with pytest.raises(LeaseLost):
            hung.progress()
    assert record(engine)["result"] == "in time"


def test_progress_keeps_it_beyond_the_time_limit(engine: sa.Engine, sessions: Sessions) -> None:
    with lease(sessions, lease_s=1.5, time_limit_s=0.8) as first:
        reaches_s = renewals(engine)

        def goes_on() -> bool:
            first.progress()
            assert not taken_over(sessions)
            return reaches_s() > 2.0

        until(goes_on)
    assert record(engine)["token"] == 1


def test_of_many_at_the_same_time_one_gets_it_and_the_others_are_busy(sessions: Sessions) -> None:
    workers = 8
    start, end = threading.Barrier(workers, timeout=WAIT_S), threading.Barrier(workers, timeout=WAIT_S)

    def work(_number: int) -> str:
        start.wait()
        try:
            with lease(sessions) as got:
                end.wait()
                return f"first with token {got.token}"
        except Busy:
            end.wait()
            return "busy"

    with ThreadPoolExecutor(workers) as pool:
        assert sorted(pool.map(work, range(workers))) == ["busy"] * (workers - 1) + ["first with token 1"]


@pytest.mark.parametrize("level", ["READ COMMITTED", "REPEATABLE READ", "SERIALIZABLE"])
def test_a_worker_that_comes_while_another_takes_the_lease_is_busy(engine: sa.Engine, level: Any) -> None:
    strict = sessionmaker(engine.execution_options(isolation_level=level))
    with ThreadPoolExecutor(1) as pool, engine.connect() as other:
        row = {"consumer": "payments", "message_id": "m-1", "state": "processing", "lease_until": later(60)}
        other.execute(processed.insert().values(row))
        second = pool.submit(lease(strict).__enter__)
        wait_until_someone_waits_for_a_lock(engine)
        other.commit()
        assert isinstance(second.exception(WAIT_S), Busy)
    with engine.begin() as connection:
        connection.execute(processed.update().values(lease_until=now()))
    with lease(strict) as first:
        first._hold.renew()
        first.complete("ok")
    assert record(engine)["result"] == "ok"


def test_nobody_waits_long_for_a_lock(engine: sa.Engine, sessions: Sessions, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("outbox.inbox.lease_record._LOCK_S", 0.05)
    with engine.begin() as connection, once(connection, "payments", "m-1"), pytest.raises(Busy):
        lease(sessions).__enter__()
    with lease(sessions) as again:
        assert not again.first


def test_a_result_that_is_not_committed_yet_keeps_others_out_however_long_it_takes(
    engine: sa.Engine, sessions: Sessions, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("outbox.inbox.lease_record._LOCK_S", 0.05)
    with lease(sessions, lease_s=0.1) as first:
        with sessions.begin() as session:
            first.complete("ok", session=session)
            until(lambda: run_out(engine))
            assert not taken_over(sessions)
        assert taken_over_as_duplicate(sessions) == "ok"


def run_out(engine: sa.Engine) -> bool:
    with engine.connect() as connection:
        return bool(connection.execute(sa.select(processed.c.lease_until < now())).scalar_one())


def taken_over_as_duplicate(sessions: Sessions) -> Any:
    with lease(sessions) as again:
        assert not again.first
        return again.result


def test_no_transaction_is_open_while_the_handler_runs(engine: sa.Engine, sessions: Sessions) -> None:
    query = "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND state LIKE 'idle in%'"
    with lease(sessions), engine.connect() as connection:
        assert connection.execute(sa.text(query)).scalar_one() == 0


def test_our_limits_do_not_outlive_our_transactions(database_url: str, engine: sa.Engine) -> None:
    single = sa.create_engine(database_url, pool_size=1, max_overflow=0)
    with lease(sessionmaker(single)), single.connect() as connection:
        names = ("statement_timeout", "lock_timeout", "idle_in_transaction_session_timeout")
        assert {connection.execute(sa.text(f"SHOW {name}")).scalar_one() for name in names} == {"0"}
    single.dispose()


class TestAsync:
    def test_the_heartbeat_keeps_it_and_a_later_delivery_gets_the_result(self, engine: sa.Engine, database_url: str) -> None:
        async def scenario(sessions: Any) -> None:
            async with lease(sessions, lease_s=1.2) as first:
                reaches_s = renewals(engine)
                await asyncio.to_thread(until, lambda: reaches_s() > 0.6)  # at least two beats
                await first.complete({"charge": 1})
            async with lease(sessions) as again:
                assert (again.first, again.result) == (False, {"charge": 1})

        self.run(scenario, database_url)

    def test_a_handler_that_makes_no_progress_loses_its_lease(
        self, engine: sa.Engine, sessions: Sessions, database_url: str
    ) -> None:
        async def scenario(async_sessions: Any) -> None:
            block = lease(async_sessions, lease_s=0.4, time_limit_s=0.2)
            hung = await block.__aenter__()
            await asyncio.to_thread(until, lambda: taken_over(sessions))
            with pytest.raises(LeaseLost):
                hung.progress()
            with pytest.raises(LeaseLost):
                await block.__aexit__(None, None, None)

        self.run(scenario, database_url)
        assert record(engine)["result"] == "in time"

    def test_a_cancelled_handler_gives_the_message_back_and_leaves_no_task(self, engine: sa.Engine, database_url: str) -> None:
        async def scenario(sessions: Any) -> None:
            entered = asyncio.Event()

            async def hang() -> None:
                async with lease(sessions, lease_s=0.3):
                    reaches_s = renewals(engine)
                    await asyncio.to_thread(until, lambda: reaches_s() > 0)
                    entered.set()
                    await asyncio.Event().wait()

            task = asyncio.create_task(hang())
            await asyncio.wait_for(entered.wait(), WAIT_S)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert asyncio.all_tasks() == {asyncio.current_task()}
            async with lease(sessions) as second:
                assert second.first

        self.run(scenario, database_url)

    def run(self, scenario: Callable[[Any], Any], database_url: str) -> None:
        async def with_sessions() -> None:
            engine = create_async_engine(database_url)
            try:
                await scenario(async_sessionmaker(engine))
            finally:
                await engine.dispose()

        asyncio.run(with_sessions())
