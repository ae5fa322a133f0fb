"""A business transaction, as it is and with one row more: a plain one, or an event."""

import random
from collections.abc import Callable, Mapping
from typing import Any

import sqlalchemy as sa
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column

import outbox
from tests.perf.parts.broker import TOPIC
from tests.perf.parts.waking import wake_by

ACCOUNTS = 1000


class Base(DeclarativeBase):
    """The tables of the business."""


class Account(Base):
    """What an order is paid from."""

    __tablename__ = "account"
    id: Mapped[int] = mapped_column(sa.BigInteger, primary_key=True)
    balance: Mapped[int]


class Order(Base):
    """What is ordered."""

    __tablename__ = "orders"
    id: Mapped[int] = mapped_column(sa.BigInteger, sa.Identity(), primary_key=True)
    account_id: Mapped[int] = mapped_column(sa.BigInteger, index=True)
    amount: Mapped[int]


class Journal(Base):
    """The plain row: what somebody would write who keeps a record of each order, with the same content as the event."""

    __tablename__ = "journal"
    id: Mapped[int] = mapped_column(sa.BigInteger, sa.Identity(), primary_key=True)
    topic: Mapped[str] = mapped_column(sa.Text)
    content: Mapped[dict[str, Any]] = mapped_column(sa.JSON)
    written_at: Mapped[Any] = mapped_column(sa.DateTime(timezone=True), server_default=sa.func.now(), index=True)


def create(engine: sa.Engine) -> None:
    """Make the tables, with some accounts."""
    Base.metadata.create_all(engine)
    with engine.begin() as connection:
        connection.execute(sa.insert(Account), [{"id": number, "balance": 10**9} for number in range(ACCOUNTS)])


def make_orderer(database_url: str, addresses: Mapping[str, str | None]) -> Callable[[str, int], int]:
    """Return a function that commits so many transactions of one kind, and returns how many.

    The kinds are `plain`, and those of `addresses`: each has an event more, and wakes the relay there.
    """
    engines = {kind: wake_by(sa.create_engine(database_url, pool_size=1), address) for kind, address in addresses.items()}
    plain = sa.create_engine(database_url, pool_size=1)

    def order(kind: str, transactions: int) -> int:
        engine, more = (engines[kind], _event) if kind in engines else (plain, _plain)
        for _ in range(transactions):
            _order(engine, more)
        return transactions

    return order


def _order(engine: sa.Engine, more: Callable[[Session, dict[str, Any]], object]) -> None:
    account_id, amount = random.randrange(ACCOUNTS), random.randrange(1, 100)
    with Session(engine) as session, session.begin():
        account = session.get_one(Account, account_id, with_for_update=True)
        account.balance -= amount
        session.add(Order(account_id=account_id, amount=amount))
        more(session, {"account": account_id, "amount": amount, "text": "x" * 200})


def _event(session: Session, content: dict[str, Any]) -> None:
    outbox.enqueue(session, outbox.Event(topic=TOPIC, payload=content, key=str(content["account"])))


def _plain(session: Session, content: dict[str, Any]) -> None:
    session.add(Journal(topic=TOPIC, content=content))
