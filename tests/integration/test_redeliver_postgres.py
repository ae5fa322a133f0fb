"""`redeliver` on PostgreSQL: right handlers pass, and each kind of wrong one is told what it does wrong."""

import asyncio
import http.client
import multiprocessing
import os
import urllib.request
from collections.abc import Iterator
from contextlib import suppress
from typing import Any
from uuid import uuid4

import httpx
import pytest
import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncSession, async_sessionmaker, create_async_engine
from sqlalchemy.orm import Session, sessionmaker

import outbox
from outbox import Inbox, Message
from outbox.errors import ConfigurationError
from outbox.testing import Scenario, redeliver
from outbox.testing.database import Database
from tests import bank
from tests.bank import DEPOSIT, account, contents, deposit, failure, handling, payment
from tests.servers.postgres import Databases


@pytest.fixture(scope="module")
def engine(postgres: Databases) -> Iterator[sa.Engine]:
    """One for all tests: the kit leaves it as it was."""
    url = postgres.create_database()
    with bank.opened(url) as engine:
        before = contents(engine)
        yield engine
        assert contents(engine) == before
    postgres.drop_database(url)


def announce(session: Any, message: Message) -> None:
    deposit(session, message)
    outbox.enqueue(session, outbox.Event(topic="payments.booked", payload={"at": str(uuid4())}, key=message.key))


def test_a_handler_that_does_all_in_its_session_passes_and_leaves_nothing_behind(engine: sa.Engine) -> None:
    before = contents(engine)
    tried = redeliver(handling(engine, announce), DEPOSIT, metadata=bank.metadata)
    assert contents(engine) == before
    assert tried.ran == (
        Scenario.TWICE,
        Scenario.TOGETHER,
        "killed before commit, then delivered again",
        Scenario.ROLLED_BACK,
    )
    assert "events enqueued.payload.at" in tried.not_compared


def test_two_deliveries_at_the_same_time_meet_at_a_lock(engine: sa.Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    seen, look = [], Database.lock_waiters
    monkeypatch.setattr(Database, "lock_waiters", lambda database: seen.append(look(database)) or seen[-1])
    redeliver(handling(engine, deposit), DEPOSIT, metadata=bank.metadata, scenarios=[Scenario.TOGETHER])
    assert seen[-1] > 0


def test_an_async_handler_passes(engine: sa.Engine) -> None:
    inbox = Inbox("bank", sessions=async_sessionmaker(create_async_engine(engine.url)))

    @inbox.transactional(DEPOSIT.topic)
    async def handle(session: AsyncSession, message: Message) -> None:
        await session.run_sync(announce, message)
        async with httpx.AsyncClient() as client:
            await client.post("https://mail.example/", headers={"Idempotency-Key": message.message_id})

    assert len(redeliver(inbox, DEPOSIT, metadata=bank.metadata).calls) == 1

    async def inside_a_loop() -> int:
        return len(redeliver(inbox, DEPOSIT, metadata=bank.metadata).ran)

    assert asyncio.run(inside_a_loop()) == 4


def test_an_async_handler_that_repeats_itself_is_found(engine: sa.Engine) -> None:
    inbox = Inbox("bank", sessions=async_sessionmaker(create_async_engine(engine.url)))

    @inbox.idempotent(DEPOSIT.topic, because="it is not")
    async def handle(session: AsyncSession, message: Message) -> None:
        await session.run_sync(announce, message)

    said = failure(inbox)
    assert f"{Scenario.TOGETHER}:\n  account: column balance is 20, expected 15  (name='ann')" in said


def test_one_that_writes_in_another_transaction(engine: sa.Engine) -> None:
    def handle(session: Session, message: Message) -> None:
        session.execute(account.update().where(account.c.name == "ann").values(balance=account.c.balance + 5))
        with engine.begin() as other:
            other.execute(payment.insert().values(account="bob", amount=5))

    said = failure(handling(engine, handle))
    assert said == (
        "handler test_one_that_writes_in_another_transaction.<locals>.handle of consumer 'bank'"
        " has another effect when its message comes again\n"
        "killed before commit, then delivered again:\n"
        "  payment: a row too many: account='bob', amount=5, note=None, details=None\n"
        "rolled back after the handler, then delivered again:\n"
        "  payment: a row too many: account='bob', amount=5, note=None, details=None"
    )


def test_one_that_commits_by_itself(engine: sa.Engine) -> None:
    def handle(session: Session, message: Message) -> None:
        deposit(session, message)
        session.commit()

    before, said = contents(engine), failure(handling(engine, handle))
    assert "one plain delivery failed with NoTransaction: the transaction was committed or rolled back by the code inside" in said
    assert "and yet it left something behind" in said
    assert "account: column balance is 15, expected 10  (name='ann')" in said
    assert contents(engine) == before


def test_one_that_raises_after_its_own_commit(engine: sa.Engine) -> None:
    def handle(session: Session, message: Message) -> None:
        deposit(session, message)
        session.commit()
        raise OSError("the printer is out of paper")

    said = failure(handling(engine, handle))
    assert "one plain delivery failed with OSError: the printer is out of paper" in said
    assert "and yet it left something behind" in said


@pytest.mark.parametrize("send", ["http.client", "urllib", "requests", "httpx"])
def test_one_that_sends_http_without_a_key(engine: sa.Engine, send: str) -> None:
    said = failure(handling(engine, lambda _session, _message: post(send, {})))
    call = "POST http://provider.example/charges"
    line = f"  HTTP: {call} had an effect 2 times, expected 1; Idempotency-Key of each call: none, none"
    assert said.splitlines()[1:] == [
        "killed before commit, then delivered again:", line, "rolled back after the handler, then delivered again:", line,
    ]  # fmt: skip


@pytest.mark.parametrize("send", ["http.client", "urllib", "requests", "httpx"])
def test_http_with_the_same_key_may_be_repeated_and_with_another_may_not(engine: sa.Engine, send: str) -> None:
    def same(session: Session, message: Message) -> None:
        post(send, {"Idempotency-Key": message.message_id})

    def another(session: Session, message: Message) -> None:
        post(send, {"Idempotency-Key": str(uuid4())})

    assert redeliver(handling(engine, same), DEPOSIT, metadata=bank.metadata).calls[0].body == b'{"amount": 5}'
    assert "had an effect 2 times, expected 1" in failure(handling(engine, another))


def post(library: str, headers: dict[str, str]) -> None:
    url, body = "http://provider.example/charges", b'{"amount": 5}'
    if library == "httpx":
        httpx.post(url, content=body, headers=headers).raise_for_status()
    elif library == "requests":
        import requests

        requests.post(url, data=body, headers=headers, timeout=1).raise_for_status()
    elif library == "urllib":
        urllib.request.urlopen(urllib.request.Request(url, data=body, headers=headers)).close()
    else:
        connection = http.client.HTTPConnection("provider.example")
        connection.request("POST", "/charges", body=body, headers=headers)
        connection.getresponse().read()


def test_one_that_swallows_a_database_error(engine: sa.Engine) -> None:
    def handle(session: Session, message: Message) -> None:
        deposit(session, message)
        with suppress(sa.exc.IntegrityError):
            session.execute(account.insert().values(name="ann", balance=0))

    said = failure(handling(engine, handle))
    assert "one plain delivery failed with TransactionAborted: A database error was swallowed" in said
    assert "left something behind" not in said


def test_one_that_swallows_a_database_error_within_a_savepoint_is_right(engine: sa.Engine) -> None:
    def handle(session: Session, message: Message) -> None:
        deposit(session, message)
        with suppress(sa.exc.IntegrityError), session.begin_nested():
            session.execute(account.insert().values(name="ann", balance=0))

    redeliver(handling(engine, handle), DEPOSIT, metadata=bank.metadata)


def forks(session: Session, message: Message) -> None:
    deposit(session, message)
    os.fork()


def forks_and_swallows(session: Session, message: Message) -> None:
    with suppress(Exception):
        forks(session, message)


def forks_by_multiprocessing(session: Session, message: Message) -> None:
    deposit(session, message)
    multiprocessing.get_context("fork").Process(target=int).start()


@pytest.mark.parametrize("handler", [forks, forks_and_swallows, forks_by_multiprocessing])
def test_one_that_forks(engine: sa.Engine, handler: Any) -> None:
    said = failure(handling(engine, handler))
    assert "one plain delivery failed with Forked: the handler forks: the child has the same database connection" in said


def test_one_that_runs_a_program_is_right(engine: sa.Engine) -> None:
    import subprocess

    def handle(session: Session, message: Message) -> None:
        deposit(session, message)
        subprocess.run(["true"], check=True)

    redeliver(handling(engine, handle), DEPOSIT, metadata=bank.metadata)


def test_an_idempotent_handler_is_run_each_time_and_must_lead_to_the_same_state(engine: sa.Engine) -> None:
    def set_it(session: Session, message: Message) -> None:
        session.execute(account.update().where(account.c.name == "ann").values(balance=15))

    redeliver(handling(engine, set_it, mode="idempotent", because="it sets"), DEPOSIT, metadata=bank.metadata)
    said = failure(handling(engine, deposit, mode="idempotent", because="it is not"))
    for scenario in (Scenario.TWICE, Scenario.TOGETHER):
        assert f"{scenario}:\n  account: column balance is 20, expected 15  (name='ann')\n  payment: a row too many" in said
    assert "killed" not in said


def test_an_idempotent_handler_that_loses_a_race_is_delivered_again(engine: sa.Engine) -> None:
    def book(session: Session, message: Message) -> None:
        if session.execute(sa.select(payment).where(payment.c.note == message.message_id)).first() is None:
            session.execute(payment.insert().values(account="ann", note=message.message_id))

    redeliver(handling(engine, book, mode="idempotent", because="note is unique"), DEPOSIT, metadata=bank.metadata)


def test_locks_of_the_test_itself_are_an_error_before_anything_is_done(
    engine: sa.Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("outbox.testing.database._LOCK_WAIT_S", 0.1)
    before = contents(engine)
    with engine.begin() as mine:
        mine.execute(sa.select(payment).with_for_update())
        with pytest.raises(ConfigurationError, match="holds locks"):
            redeliver(handling(engine, deposit), DEPOSIT, metadata=bank.metadata, scenarios=[Scenario.TWICE])
    assert contents(engine) == before


def test_in_a_session_that_is_rolled_back(engine: sa.Engine) -> None:
    with engine.connect() as connection:
        connection.execute(account.insert().values(name="eve", balance=0))
        inbox = Inbox("bank", sessions=sessionmaker(connection, join_transaction_mode="create_savepoint"))
        inbox.transactional(DEPOSIT.topic)(deposit)
        redeliver(inbox, DEPOSIT, metadata=bank.metadata)
        assert connection.execute(sa.select(account.c.balance).where(account.c.name == "ann")).scalar_one() == 10
