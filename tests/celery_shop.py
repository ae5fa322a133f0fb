"""The Celery application of the tests: the same tasks on a plain app, whose workers know nothing of us, and on ours.

`held` tasks say that they have begun by a file in the folder GATE, and go on when there is a file `go`.
"""

import codecs
import json
import os
import threading
from pathlib import Path
from typing import Any

import kombu
import sqlalchemy as sa
from celery import Celery
from kombu.serialization import register
from sqlalchemy.orm import Session, sessionmaker

from outbox.celery import LeasedTask, OutboxCelery, TransactionalTask

register(
    "rot13",
    lambda value: codecs.encode(json.dumps(value), "rot13"),
    lambda body: json.loads(codecs.decode(body if isinstance(body, str) else body.decode(), "rot13")),
    content_type="application/x-rot13",
    content_encoding="utf-8",
)
metadata = sa.MetaData()
effect = sa.Table(
    "celery_effect",
    metadata,
    sa.Column("id", sa.Integer, primary_key=True),
    sa.Column("what", sa.Text, nullable=False),
)
engine = sa.create_engine(os.environ.get("OUTBOX_DATABASE_URL", "sqlite://"))
sessions = sessionmaker(engine)
GATE = Path(os.environ.get("GATE", "."))


def configured(kind: type[Celery], broker_url: str, results: str | None) -> Celery:
    """Return an app of either kind with the tasks that both have."""
    app = kind("shop", set_as_current=False)
    app.conf.update(
        broker_url=broker_url,
        result_backend=results,
        accept_content=["json", "rot13"],
        broker_connection_retry_on_startup=True,
        worker_prefetch_multiplier=1,
        worker_concurrency=1,
        worker_cancel_long_running_tasks_on_connection_loss=True,
        task_queues=[
            kombu.Queue("celery"),
            kombu.Queue("jobs", kombu.Exchange("jobs", type="topic"), routing_key="jobs.#", max_priority=5),
        ],
    )
    app.task(name="shop.add", shared=False)(add)
    app.task(name="shop.total", shared=False)(total)
    app.task(name="shop.headers", bind=True, shared=False)(headers)
    return app


def add(one: Any, other: Any) -> Any:
    """Add two numbers."""
    return one + other


def total(numbers: list[int]) -> int:
    """Add many numbers."""
    return sum(numbers)


def headers(self: Any) -> Any:
    """Return what the message carried."""
    request = self.request
    return {"custom": (request.headers or {}).get("custom"), "priority": request.delivery_info["priority"], "id": request.id}


class ShopTask(TransactionalTask):
    """What all transactional tasks of the shop have in common."""

    abstract = True
    sessions = sessions


class OutsideTask(LeasedTask):
    """What all tasks of the shop with an effect outside have in common."""

    abstract = True
    sessions = sessions
    lease_s = 2.0


SERVERS = os.environ.get("OUTBOX_BROKER_URL", "memory://"), os.environ.get("RESULTS")
plain = configured(Celery, *SERVERS)
shop = configured(OutboxCelery, *SERVERS)
for app in (plain, shop):
    app.conf.broker_transport_options = json.loads(os.environ.get("TRANSPORT", "{}"))


def write(session: Session, what: str) -> None:
    """Have an effect. No constraint keeps a second one out."""
    session.execute(effect.insert().values(what=what))


@shop.task(base=ShopTask, bind=True, name="shop.record", shared=False)
def record(self: Any, before: Any, what: str = "") -> str:
    """Have one effect; in a chain, what came before it is written too."""
    write(self.session, f"{before}{what}")
    return f"{before}{what}"


@shop.task(base=ShopTask, bind=True, name="shop.held", shared=False)
def held(self: Any, what: str) -> str:
    """Have one effect, and wait in the middle of it."""
    write(self.session, what)
    (GATE / f"begun-{os.getpid()}").touch()
    while not (GATE / "go").exists():
        threading.Event().wait(0.02)
    return what


@shop.task(base=ShopTask, bind=True, name="shop.second_try", max_retries=3, shared=False)
def second_try(self: Any, what: str) -> str:
    """Have one effect, fail, and try again."""
    write(self.session, f"{what}, try {self.request.retries}")
    if not self.request.retries:
        raise self.retry(countdown=0.1)
    return what


@shop.task(base=ShopTask, bind=True, name="shop.failing", shared=False)
def failing(self: Any, what: str) -> str:
    """Have an effect, call another task, and fail."""
    write(self.session, what)
    record.delay(what)
    raise ValueError(what)


@shop.task(name="shop.careless", shared=False)
def careless(what: str) -> None:
    """Call a task outside every unit of work."""
    record.delay(what)


@shop.task(base=ShopTask, bind=True, name="shop.replaced", shared=False)
def replaced(self: Any, what: str) -> None:
    """Have an effect and leave the rest to another task."""
    write(self.session, f"{what}, first half")
    self.replace(record.si(f"{what}, second half"))


@shop.task(base=OutsideTask, bind=True, name="shop.charged", shared=False)
def charged(self: Any, what: str) -> str:
    """Ask another system, which knows the idempotency key and here is a table, and wait in the middle of it."""
    with sessions.begin() as session:
        write(session, f"{what} {self.lease.idempotency_key}")
    (GATE / f"begun-{os.getpid()}").touch()
    while not (GATE / "go").exists():
        threading.Event().wait(0.02)
    return what
