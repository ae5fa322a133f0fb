"""A consumer without a broker: it is handed what arrives, and claims what is due, as `outbox-consume` does."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from types import ModuleType
from typing import Any

import pytest
import sqlalchemy as sa
from click.testing import CliRunner, Result
from sqlalchemy.ext.asyncio import AsyncSession, async_sessionmaker, create_async_engine
from sqlalchemy.orm import Session, sessionmaker

from outbox import Inbox, Message
from outbox.backoff import Backoff
from outbox.cli.consume import main
from outbox.inbox.limits import Guard
from outbox.inbox.processing import Run, processing
from outbox.inbox.receiving import Receiver, Work
from outbox.states import OnDead, RetryPolicy
from outbox.store.engine import open_engine
from outbox.tables import DEFAULT, metadata

failed = DEFAULT.failed
effects = sa.Table("effects", sa.MetaData(), sa.Column("id", sa.Integer, primary_key=True), sa.Column("message_id", sa.Text))
DIED = datetime(2026, 1, 31, 8, 30, tzinfo=UTC)


class Refused(Exception):
    """The other side says no."""


class Shop:
    """An application whose handler refuses the messages whose ids are in `broken`, which is to say that these die at once."""

    def __init__(self, url: str, *, on_dead: OnDead = OnDead.BLOCK, is_async: bool = False, **options: Any) -> None:
        self.engine = open_engine(url, pool_size=20)
        metadata.create_all(self.engine)
        effects.metadata.create_all(self.engine)
        self.broken: set[str] = set()
        self.inbox = Inbox("shipping", sessions=_async_sessions(url) if is_async else sessionmaker(self.engine), **options)
        policy = RetryPolicy(max_attempts=1, backoff=Backoff(first_s=0, ceiling_s=0), on_dead=on_dead)
        self.inbox.transactional("orders.#", retry=policy)(self._handle_async if is_async else self._handle)

    def _handle(self, session: Session, message: Message) -> None:
        session.execute(effects.insert().values(message_id=message.message_id))
        self._judge(message)

    async def _handle_async(self, session: AsyncSession, message: Message) -> None:
        await session.execute(effects.insert().values(message_id=message.message_id))
        self._judge(message)

    def _judge(self, message: Message) -> None:
        if message.message_id in self.broken:
            raise Refused(f"not {message.message_id}")

    def deliver(self, *message_ids: str, key: str | None = None, topic: str = "orders.placed") -> None:
        """Hand messages to the consumer, in this order."""
        with processing(self.inbox) as run:
            for message_id in message_ids:
                receive(run, self.inbox, Work(Message(message_id=message_id, topic=topic, payload=b'{"n": 1}', key=key)))

    def work(self) -> None:
        """Have everything handled that is due."""
        with processing(self.inbox) as run:
            while claim_and_receive(run, self.inbox):
                pass

    def handled(self) -> list[str]:
        """The ids of the messages that have had their effect, in the order in which they had it."""
        with self.engine.connect() as connection:
            return list(connection.execute(sa.select(effects.c.message_id).order_by(effects.c.id)).scalars())

    def failed(self) -> dict[str, str]:
        """The states of the failed messages by their ids, in the order in which they came."""
        return {row["message_id"]: row["state"] for row in self.rows()}

    def rows(self) -> list[dict[str, Any]]:
        """All columns of the failed messages."""
        with self.engine.connect() as connection:
            return [dict(row) for row in connection.execute(sa.select(failed).order_by(failed.c.id)).mappings()]

    def row(self, message_id: str) -> dict[str, Any]:
        (row,) = (row for row in self.rows() if row["message_id"] == message_id)
        return row

    def bury(self, number: int, *, prefix: str = "m", keys: int = 0, **values: Any) -> None:
        """Dead messages in one go, of so many keys."""
        usual = {"consumer": "shipping", "topic": "orders.placed", "payload": b"{}", "state": "dead", "attempts": 20}
        usual |= {"dead_at": DIED, "error_class": "Refused", "last_error": "no"} | values
        rows = [
            usual | {"message_id": f"{prefix}-{n}", "key": f"key-{n % keys}" if keys else values.get("key")}
            for n in range(number)
        ]
        with self.engine.begin() as connection:
            connection.execute(failed.insert(), rows)

    def close(self) -> None:
        self.engine.dispose()


def receive(run: Run, inbox: Inbox, work: Work) -> None:
    run(Receiver(inbox).receive, work, Guard())


def claim_and_receive(run: Run, inbox: Inbox, most: int = 10) -> int:
    """Claim what is due, and have it handled; return how many that were."""
    works: list[Work] = run(Receiver(inbox).claim, most)
    for work in works:
        receive(run, inbox, work)
    return len(works)


@contextmanager
def shop_at(url: str, monkeypatch: pytest.MonkeyPatch, **options: Any) -> Iterator[Shop]:
    """A shop that commands find under `shop:inbox`."""
    shop, module = Shop(url, **options), ModuleType("shop")
    vars(module)["inbox"] = shop.inbox
    monkeypatch.setitem(sys.modules, "shop", module)
    yield shop
    shop.close()


def call(*arguments: object, code: int = 0, **more: Any) -> Result:
    """Run `outbox-consume`."""
    result = CliRunner().invoke(main, [str(each) for each in arguments], prog_name="outbox-consume", **more)
    assert result.exit_code == code, result.output
    return result


def _async_sessions(url: str) -> "async_sessionmaker[AsyncSession]":
    driver = "sqlite+aiosqlite" if url.startswith("sqlite") else "postgresql+psycopg"
    return async_sessionmaker(create_async_engine(sa.make_url(url).set(drivername=driver)))
