"""Leased handlers of an `Inbox`, plain and `async def`, and `async with leased(...)`."""

import asyncio
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncSession, async_scoped_session, async_sessionmaker, create_async_engine
from sqlalchemy.orm import Session, sessionmaker

import outbox
from outbox import Inbox, Message
from outbox.errors import ConfigurationError, NoTransaction
from outbox.inbox import AsyncLease, Busy, InvalidResult, Lease, LeaseLost, Result, leased
from outbox.inbox.errors import InvalidMessageId, UnusableMessage
from outbox.inbox.failing import retry_after_s
from outbox.sqltypes import later
from outbox.tables import DEFAULT

processed = DEFAULT.processed
MESSAGE = Message(message_id="m-1", topic="orders.placed", payload=b'{"order": 7}')


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[sa.Engine]:
    engine = sa.create_engine(f"sqlite:///{tmp_path}/app.db", connect_args={"timeout": 0.1})
    outbox.metadata.create_all(engine)
    yield engine
    engine.dispose()


@pytest.fixture
def inbox(engine: sa.Engine) -> Inbox:
    return Inbox("payments", sessions=sessionmaker(engine))


def result(engine: sa.Engine) -> tuple[str, Any]:
    with engine.connect() as connection:
        return tuple(connection.execute(sa.select(processed.c.state, processed.c.result)).one())  # type: ignore[return-value]


def run_out(engine: sa.Engine) -> None:
    with engine.begin() as connection:
        connection.execute(sa.update(processed).values(lease_until=later(sa.literal(-1.0))))


def test_what_a_handler_returns_is_kept_and_it_runs_once(engine: sa.Engine, inbox: Inbox) -> None:
    keys: list[str] = []

    @inbox.leased("orders.*")
    def charge(lease: Lease, message: Message) -> dict[str, Any]:
        keys.append(lease.idempotency_key)
        return {"charge": message.json()["order"]}

    assert [inbox.process(MESSAGE), inbox.process(MESSAGE)] == [Result.HANDLED, Result.DUPLICATE]
    assert keys == ["payments:m-1"]
    assert result(engine) == ("done", {"charge": 7})


def test_a_handler_may_complete_beside_its_own_rows(engine: sa.Engine, inbox: Inbox) -> None:
    @inbox.leased("orders.*")
    def charge(lease: Lease, message: Message) -> str:
        with Session(engine) as session, session.begin():
            outbox.enqueue(session, outbox.Event(topic="payments.taken", payload=message.json()))
            lease.complete("mine", session=session)
        return "not kept"

    assert inbox.process(MESSAGE) is Result.HANDLED
    assert result(engine) == ("done", "mine")


def test_a_handler_that_forgets_to_commit_its_rows_has_failed(engine: sa.Engine, inbox: Inbox) -> None:
    @inbox.leased("orders.*")
    def charge(lease: Lease, message: Message) -> None:
        with Session(engine) as session:
            lease.complete("mine", session=session)

    with pytest.raises(NoTransaction):
        inbox.process(MESSAGE)
    assert result(engine)[0] == "processing"


@pytest.mark.parametrize(
    ("returned", "error"), [(ValueError("no"), ValueError), (SystemExit(), SystemExit), (object(), InvalidResult)]
)
def test_a_handler_that_fails_gives_the_message_back(inbox: Inbox, returned: object, error: type[BaseException]) -> None:
    returns = iter([returned, "ok"])

    @inbox.leased("orders.*")
    def charge(lease: Lease, message: Message) -> object:
        value = next(returns)
        if isinstance(value, BaseException):
            raise value
        return value

    with pytest.raises(error):
        inbox.process(MESSAGE)
    assert inbox.process(MESSAGE) is Result.HANDLED


def test_a_message_that_another_worker_holds_is_busy(engine: sa.Engine, inbox: Inbox) -> None:
    inbox.leased("orders.*")(lambda _lease, _message: pytest.fail("two at once"))
    with leased(sessionmaker(engine), "payments", "m-1"), pytest.raises(Busy):
        inbox.process(MESSAGE)


def test_a_message_under_a_lease_is_tried_again_when_that_may_be_over_not_every_second() -> None:
    assert [retry_after_s(Busy(retry_after_s=left_s)) for left_s in (30.0, 3600.0, None, 0.0)] == [30.0, 60.0, 1.0, 1.0]


def test_a_handler_that_has_lost_its_lease_is_not_acknowledged(engine: sa.Engine, inbox: Inbox) -> None:
    @inbox.leased("orders.*")
    def charge(lease: Lease, message: Message) -> str:
        run_out(engine)
        with leased(sessionmaker(engine), "payments", "m-1") as other:
            other.complete("in time")
        return "late"

    with pytest.raises(LeaseLost):
        inbox.process(MESSAGE)
    assert inbox.process(MESSAGE) is Result.DUPLICATE
    assert result(engine) == ("done", "in time")


def test_the_lease_lasts_as_long_as_the_rules_say(engine: sa.Engine, inbox: Inbox) -> None:
    @inbox.leased("orders.*", lease_s=1000, time_limit_s=7)
    def charge(lease: Lease, message: Message) -> None:
        assert lease._hold._time_limit_s == 7
        with pytest.raises(Busy) as busy:
            leased(sessionmaker(engine), "payments", "m-1").__enter__()
        assert 900 < (busy.value.retry_after_s or 0) <= 1000

    assert inbox.process(MESSAGE) is Result.HANDLED
    with pytest.raises(ConfigurationError, match="lease_s"):
        inbox.leased("refunds.*", lease_s=0)


def test_ids_are_checked_before_anything_is_done(inbox: Inbox) -> None:
    inbox.leased("orders.*")(lambda _lease, _message: pytest.fail("called"))
    for bad, error in (("", UnusableMessage), ("x" * 256, InvalidMessageId)):
        with pytest.raises(error):
            inbox.process(Message(message_id=bad, topic="orders.placed", payload=b""))


class TestAsync:
    @pytest.fixture
    def run(self, engine: sa.Engine) -> Callable[[Callable[[Any], Coroutine[Any, Any, None]]], None]:
        async def with_sessions(scenario: Callable[[Any], Coroutine[Any, Any, None]]) -> None:
            async_engine = create_async_engine(str(engine.url).replace("sqlite:", "sqlite+aiosqlite:"))
            try:
                await scenario(async_sessionmaker(async_engine))
            finally:
                await async_engine.dispose()

        return lambda scenario: asyncio.run(with_sessions(scenario))

    def test_an_async_handler(self, run: Any, engine: sa.Engine) -> None:
        async def scenario(sessions: async_sessionmaker[AsyncSession]) -> None:
            inbox = Inbox("payments", sessions=sessions)

            @inbox.leased("orders.*")
            async def charge(lease: AsyncLease, message: Message) -> str:
                await asyncio.sleep(0)
                lease.progress()
                return lease.idempotency_key

            assert [await inbox.process_async(MESSAGE) for _ in range(2)] == [Result.HANDLED, Result.DUPLICATE]

        run(scenario)
        assert result(engine) == ("done", "payments:m-1")

    def test_the_block(self, run: Any) -> None:
        async def scenario(sessions: async_sessionmaker[AsyncSession]) -> None:
            async with leased(sessions, "payments", "m-1") as first:
                with pytest.raises(Busy):
                    await leased(sessions, "payments", "m-1").__aenter__()
                await first.complete({"charge": 1})
            async with leased(sessions, "payments", "m-1") as again:
                assert (again.first, again.result) == (False, {"charge": 1})

        run(scenario)

    def test_completing_in_a_session(self, run: Any) -> None:
        async def scenario(sessions: async_sessionmaker[AsyncSession]) -> None:
            async with leased(sessions, "payments", "m-1") as first, sessions.begin() as session:
                await first.complete(1, session=session)
            async with leased(sessions, "payments", "m-2") as second, sessions.kw["bind"].begin() as connection:
                await second.complete(2, session=connection)
            scoped = async_scoped_session(sessions, scopefunc=lambda: 1)
            async with leased(sessions, "payments", "m-3") as third:
                await third.complete(3, session=scoped)
                await scoped.commit()
            await scoped.remove()
            for number in (1, 2, 3):
                async with leased(sessions, "payments", f"m-{number}") as again:
                    assert again.result == number

        run(scenario)

    def test_an_exception_gives_the_message_back(self, run: Any) -> None:
        async def scenario(sessions: async_sessionmaker[AsyncSession]) -> None:
            with pytest.raises(KeyError, match="mine"):
                async with leased(sessions, "payments", "m-1"):
                    raise KeyError("mine")
            async with leased(sessions, "payments", "m-1") as second:
                assert second.first

        run(scenario)

    def test_so_does_cancelling_the_task(self, run: Any) -> None:
        async def scenario(sessions: async_sessionmaker[AsyncSession]) -> None:
            entered = asyncio.Event()

            async def hang() -> None:
                async with leased(sessions, "payments", "m-1"):
                    entered.set()
                    await asyncio.Event().wait()

            task = asyncio.create_task(hang())
            await entered.wait()
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            async with leased(sessions, "payments", "m-1") as second:
                assert second.first

        run(scenario)

    def test_what_was_taken_over_cannot_be_completed(self, run: Any, engine: sa.Engine) -> None:
        async def scenario(sessions: async_sessionmaker[AsyncSession]) -> None:
            block = leased(sessions, "payments", "m-1")
            await block.__aenter__()
            run_out(engine)
            async with leased(sessions, "payments", "m-1") as new:
                await new.complete("in time")
            with pytest.raises(LeaseLost):
                await block.__aexit__(None, None, None)

        run(scenario)
        assert result(engine) == ("done", "in time")
