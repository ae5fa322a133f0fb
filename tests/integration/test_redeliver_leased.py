"""`redeliver` for leased handlers on PostgreSQL: a call may be repeated with the same key, and nothing else may."""

from collections.abc import Iterator
from typing import Any
from uuid import uuid4

import httpx
import pytest
import requests
import sqlalchemy as sa
from sqlalchemy.ext.asyncio import async_sessionmaker, create_async_engine

from outbox import Inbox, Message
from outbox.testing import Scenario, redeliver
from tests import bank
from tests.bank import DEPOSIT, failure, handling, payment
from tests.servers.postgres import Databases

CHARGES = "https://provider.example/charges"
SCENARIOS = (
    Scenario.TWICE,
    Scenario.TOGETHER,
    "killed after lease, then delivered again",
    "killed before complete, then delivered again",
    Scenario.ROLLED_BACK,
    Scenario.LEASE_LOST,
)


@pytest.fixture(scope="module")
def engine(postgres: Databases) -> Iterator[sa.Engine]:
    url = postgres.create_database()
    with bank.opened(url) as engine:
        before = bank.contents(engine)
        yield engine
        assert bank.contents(engine) == before
    postgres.drop_database(url)


def charge(key: str | None) -> str:
    headers = {} if key is None else {"Idempotency-Key": key}
    return requests.post(CHARGES, data=b"5", headers=headers, timeout=1).text


def test_one_that_hands_on_its_key_passes(engine: sa.Engine) -> None:
    inbox = handling(engine, lambda lease, _message: charge(lease.idempotency_key), mode="leased")
    tried = redeliver(inbox, DEPOSIT, metadata=bank.metadata)
    assert tried.ran == SCENARIOS
    assert len(tried.calls) == 1


@pytest.mark.parametrize("key", [lambda: None, lambda: str(uuid4())], ids=["no key", "another key"])
def test_one_without_that_key_does_not(engine: sa.Engine, key: Any) -> None:
    said = failure(handling(engine, lambda _lease, _message: charge(key()), mode="leased"))
    wrong = [line for line in said.splitlines()[1:] if line.endswith(":")]
    assert wrong == [f"{scenario}:" for scenario in SCENARIOS[3:]]
    assert said.count(f"HTTP: POST {CHARGES} had an effect 2 times, expected 1; Idempotency-Key of each call:") == 3


def test_rows_that_it_writes_in_the_transaction_of_its_completion_are_there_once(engine: sa.Engine) -> None:
    def handle(lease: Any, message: Message) -> None:
        charge(lease.idempotency_key)
        with engine.begin() as connection:
            connection.execute(payment.insert().values(account="ann", amount=5))
            lease.complete("charged", session=connection)

    redeliver(handling(engine, handle, mode="leased"), DEPOSIT, metadata=bank.metadata)


def test_rows_that_it_writes_in_another_transaction_are_found(engine: sa.Engine) -> None:
    def handle(lease: Any, message: Message) -> None:
        with engine.begin() as connection:
            connection.execute(payment.insert().values(account="ann", amount=5))

    said = failure(handling(engine, handle, mode="leased"))
    assert f"{Scenario.LEASE_LOST}:\n  payment: a row too many: account='ann', amount=5" in said


def test_an_async_one(engine: sa.Engine) -> None:
    inbox = Inbox("bank", sessions=async_sessionmaker(create_async_engine(engine.url)))
    keyed = True

    @inbox.leased(DEPOSIT.topic)
    async def handle(lease: Any, message: Message) -> None:
        async with httpx.AsyncClient() as client:
            await client.post(CHARGES, headers={"Idempotency-Key": lease.idempotency_key} if keyed else {})

    assert redeliver(inbox, DEPOSIT, metadata=bank.metadata).ran == SCENARIOS
    keyed = False
    assert f"{Scenario.LEASE_LOST}:\n  HTTP: POST {CHARGES} had an effect 2 times" in failure(inbox)


def test_on_sqlite_it_is_redelivered_too(tmp_path: Any) -> None:
    with bank.opened(f"sqlite:///{tmp_path}/bank.db") as sqlite:
        inbox = handling(sqlite, lambda lease, _message: charge(lease.idempotency_key), mode="leased")
        assert redeliver(inbox, DEPOSIT, metadata=bank.metadata).ran == SCENARIOS
        assert "had an effect 2 times" in failure(handling(sqlite, lambda _lease, _message: charge(None), mode="leased"))
