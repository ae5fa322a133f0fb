"""A bank for the tests of the kit: accounts, payments, and an inbox whose handlers each test writes."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import sqlalchemy as sa
from sqlalchemy.orm import Session, sessionmaker

import outbox
from outbox import Inbox, Message
from outbox.testing import redeliver

metadata = sa.MetaData()
account = sa.Table(
    "account", metadata, sa.Column("name", sa.Text, primary_key=True), sa.Column("balance", sa.Integer, nullable=False)
)
payment = sa.Table(
    "payment",
    metadata,
    sa.Column("id", sa.Integer, primary_key=True),
    sa.Column("account", sa.ForeignKey(account.c.name)),
    sa.Column("amount", sa.Integer),
    sa.Column("note", sa.Text, unique=True),
    sa.Column("details", sa.JSON),
    sa.Column("paid_at", sa.DateTime, server_default=sa.func.now()),
)
DEPOSIT = Message(message_id="m-1", topic="deposits.made", payload=b'{"account": "ann", "amount": 5}', key="ann")


@contextmanager
def opened(url: str, **options: Any) -> Iterator[sa.Engine]:
    """The bank's database, with two accounts."""
    engine = sa.create_engine(url, **options)
    metadata.create_all(engine)
    outbox.metadata.create_all(engine)
    with engine.begin() as connection:
        connection.execute(account.insert(), [{"name": "ann", "balance": 10}, {"name": "bob", "balance": 10}])
        connection.execute(payment.insert().values(account="bob", amount=10, details=None))
    try:
        yield engine
    finally:
        engine.dispose()


def handling(engine: sa.Engine, handler: Callable[[Any, Message], Any], *, mode: str = "transactional", **options: Any) -> Inbox:
    inbox = Inbox("bank", sessions=sessionmaker(engine))
    getattr(inbox, mode)(DEPOSIT.topic, **options)(handler)
    return inbox


def deposit(session: Session | sa.Connection, message: Message) -> None:
    """What a right handler does."""
    wanted = message.json()
    here = account.c.name == wanted["account"]
    session.execute(account.update().where(here).values(balance=account.c.balance + wanted["amount"]))
    session.execute(payment.insert().values(wanted))


def failure(inbox: Inbox, message: Message = DEPOSIT, **options: Any) -> str:
    """What `redeliver` says against a handler."""
    try:
        redeliver(inbox, message, metadata=metadata, **options)
    except AssertionError as error:
        return str(error)
    raise RuntimeError("the kit has found nothing")


def contents(engine: sa.Engine) -> dict[str, list[Any]]:
    with engine.connect() as connection:
        tables = [*metadata.sorted_tables, *outbox.metadata.sorted_tables]
        return {table.name: sorted(map(tuple, connection.execute(sa.select(table))), key=repr) for table in tables}
