"""The business of the fault tests: orders, what was done for them, and the consumer that does it.

`effect` has no unique constraint on purpose: a message handled twice shows as two rows.
"""

import os

import sqlalchemy as sa
from sqlalchemy.orm import Session, sessionmaker

import outbox

TOPIC = "orders.placed"
metadata = sa.MetaData()
order = sa.Table(
    "shop_order",
    metadata,
    sa.Column("number", sa.Text, primary_key=True),
    sa.Column("customer", sa.Text, nullable=False),
)
effect = sa.Table(
    "shop_effect",
    metadata,
    sa.Column("id", sa.BigInteger, sa.Identity(), primary_key=True),
    sa.Column("number", sa.Text, nullable=False),
)


def place(session: Session, number: str, customer: str) -> None:
    """Write an order and its event into the caller's transaction."""
    session.execute(sa.insert(order).values(number=number, customer=customer))
    outbox.enqueue(session, outbox.Event(topic=TOPIC, payload={"number": number}, key=customer))


def open_inbox() -> outbox.Inbox:
    """Return the consumer that does the work of an order, in the database that the environment names."""
    engine = sa.create_engine(os.environ["OUTBOX_DATABASE_URL"], pool_size=8)
    inbox = outbox.Inbox("work", sessions=sessionmaker(engine), ordered=True)

    # So long, and a few seconds, may a process that is suspended in a handler's transaction keep its locks.
    @inbox.transactional("orders.*", time_limit_s=10)
    def work(session: Session, message: outbox.Message) -> None:
        session.execute(sa.insert(effect).values(number=message.json()["number"]))

    return inbox
