"""The consumer of the benchmarks, which `outbox-consume` loads: for each message it writes its number down."""

import os

import sqlalchemy as sa
from sqlalchemy.orm import Session, sessionmaker

import outbox

metadata = sa.MetaData()
# No unique constraint on purpose: a message handled twice shows as two rows.
effect = sa.Table(
    "bench_effect",
    metadata,
    sa.Column("id", sa.BigInteger, sa.Identity(), primary_key=True),
    sa.Column("number", sa.BigInteger, nullable=False),
)


def _open_inbox() -> outbox.Inbox:
    engine = sa.create_engine(os.environ["OUTBOX_DATABASE_URL"], pool_size=8)
    inbox = outbox.Inbox("bench", sessions=sessionmaker(engine))

    @inbox.transactional("bench.*")
    def note(session: Session, message: outbox.Message) -> None:
        session.execute(sa.insert(effect).values(number=message.json()["number"]))

    return inbox


if "OUTBOX_DATABASE_URL" in os.environ:
    inbox = _open_inbox()
