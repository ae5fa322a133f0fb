"""Every handler of examples/orders under every kind of redelivery, with the messages that the shop itself publishes."""

import importlib
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import sqlalchemy as sa

import outbox
from outbox import Inbox, Message
from outbox.testing import Scenario, assert_enqueued, drain, redeliver
from tests.servers.postgres import Databases
from tests.story import ROOT


@pytest.fixture(scope="module")
def database(postgres: Databases) -> Iterator[str]:
    url = postgres.create_database()
    yield url
    postgres.drop_database(url)


@pytest.fixture(scope="module")
def orders(database: str) -> Iterator[Any]:
    """The modules of the example, on a database of ours; an order is placed and nothing is published yet."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(ROOT / "examples/orders")
        patch.setenv("OUTBOX_DATABASE_URL", database)
        modules = {name: importlib.import_module(f"orders.{name}") for name in ("database", "models", "consumer", "place")}
        engine = modules["database"].engine
        modules["models"].Base.metadata.create_all(engine)
        outbox.metadata.create_all(engine)
        with modules["database"].sessions.begin() as session:
            session.add(modules["models"].Item(name="teapot", price=29.9, in_stock=5))
            session.flush()
            modules["place"].place(session, "teapot", 2)
        yield modules
        engine.dispose()
        for name in [name for name in sys.modules if name.partition(".")[0] == "orders"]:
            del sys.modules[name]


@pytest.fixture(scope="module")
def messages(orders: Any) -> dict[str, Message]:
    """What is published from one order, by topic: found out in a transaction that is rolled back."""
    with orders["database"].engine.connect() as connection:
        published = drain(connection, to=orders["consumer"].inbox)
        connection.rollback()
    return {message.topic: message for message in published}


def test_every_handler_has_a_message_here(orders: Any, messages: dict[str, Message]) -> None:
    assert set(orders["consumer"].inbox.patterns) == set(messages) == {"orders.placed", "payments.taken"}


@pytest.mark.parametrize("topic", ["orders.placed", "payments.taken"])
def test_no_redelivery_has_a_second_effect(orders: Any, messages: dict[str, Message], topic: str) -> None:
    tried = redeliver(orders["consumer"].inbox, messages[topic], metadata=orders["models"].Base.metadata)
    assert {Scenario.TWICE, Scenario.TOGETHER, Scenario.ROLLED_BACK} < set(tried.ran)
    assert tried.calls == ()


def test_the_messages_of_an_order_may_come_in_any_order(orders: Any, messages: dict[str, Message]) -> None:
    tried = redeliver(
        orders["consumer"].inbox,
        messages["orders.placed"],
        metadata=orders["models"].Base.metadata,
        after=[messages["payments.taken"]],
        scenarios=[Scenario.LATE, Scenario.OUT_OF_ORDER],
    )
    assert len(tried.ran) == 2


def test_an_order_that_is_placed_is_paid_and_shipped_within_a_transaction_that_is_rolled_back(orders: Any) -> None:
    inbox: Inbox = orders["consumer"].inbox
    with orders["database"].engine.connect() as connection:
        assert_enqueued(connection, topic="orders.placed")
        assert [message.topic for message in drain(connection, to=inbox)] == ["orders.placed", "payments.taken"]
        assert connection.scalar(sa.text("SELECT count(*) FROM shipments")) == 1
        connection.rollback()
        assert connection.scalar(sa.text("SELECT count(*) FROM shipments")) == 0
        assert_enqueued(connection, topic="orders.placed")
