"""The leased handler of examples/payments under every kind of redelivery, with a provider that answers as the real one does."""

import importlib
import sys
from collections.abc import Iterator
from decimal import Decimal
from typing import Any
from uuid import UUID

import pytest

import outbox
from outbox import Message
from outbox.testing import Answer, Call, Scenario, redeliver
from tests.servers.postgres import Databases
from tests.story import ROOT

ORDER = UUID(int=1)
WANTED = Message(
    message_id="m-1",
    topic="payments.wanted",
    payload=f'{{"order_id": "{ORDER}", "amount": "29.90"}}'.encode(),
    key=str(ORDER),
)


@pytest.fixture
def payments(postgres: Databases) -> Iterator[dict[str, Any]]:
    url = postgres.create_database()
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(ROOT / "examples/payments")
        patch.setenv("OUTBOX_DATABASE_URL", url)
        patch.setenv("PROVIDER_URL", "http://provider.example")
        modules = {name: importlib.import_module(f"payments.{name}") for name in ("database", "models", "consumer")}
        engine = modules["database"].engine
        modules["models"].Base.metadata.create_all(engine)
        outbox.metadata.create_all(engine)
        with modules["database"].sessions.begin() as session:
            session.add(modules["models"].Payment(order_id=ORDER, amount=Decimal("29.90")))
        yield modules
        engine.dispose()
        for name in [name for name in sys.modules if name.partition(".")[0] == "payments"]:
            del sys.modules[name]
    postgres.drop_database(url)


def test_no_redelivery_charges_twice(payments: dict[str, Any]) -> None:
    keys = set[str]()

    def charge(call: Call) -> Answer:
        keys.add(call.headers["idempotency-key"])
        return Answer(body=b'{"id": "ch_1", "amount": "29.90"}')

    inbox = payments["consumer"].inbox
    assert inbox.patterns == (WANTED.topic,)
    tried = redeliver(inbox, WANTED, metadata=payments["models"].Base.metadata, respond=charge)
    assert Scenario.LEASE_LOST in tried.ran
    assert len(tried.calls) == len(keys) == 1
