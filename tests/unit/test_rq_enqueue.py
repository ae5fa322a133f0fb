"""What `outbox.rq.enqueue` writes, and what it refuses before anything is written."""

import json
import subprocess
import sys
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import Any
from uuid import UUID, uuid4

import pytest
import sqlalchemy as sa
from sqlalchemy.orm import Session

import outbox.rq
from outbox.errors import InvalidEvent
from outbox.rq import JobOptions
from outbox.rqjob import CONTENT_TYPE, NotAJob, RqJob, read
from outbox.tables import DEFAULT
from tests.rows import sqlite_database


def send(order_id: int, language: str = "en") -> None: ...


class Mail:
    @staticmethod
    def send(order_id: int) -> None: ...

    def bound(self) -> None: ...


class Colour(StrEnum):
    RED = "red"


@pytest.fixture
def session(tmp_path: Path) -> Iterator[Session]:
    engine = sqlite_database(tmp_path)
    with Session(engine) as session:
        yield session
    engine.dispose()


def row(session: Session) -> sa.RowMapping:
    session.flush()
    return session.execute(sa.select(DEFAULT.message)).mappings().one()


def job(session: Session) -> RqJob:
    found = row(session)
    return read(found["content_type"], found["payload"])


def test_a_job_is_a_row_with_a_call_in_json(session: Session) -> None:
    job_id = outbox.rq.enqueue(session, "mail.high", send, 7, language="de")
    found = row(session)
    assert (found["message_id"], found["topic"], found["type"]) == (job_id, "rq.mail.high", "rq.job")
    assert found["content_type"] == CONTENT_TYPE
    called = json.loads(found["payload"])
    assert (called["queue"], called["function"]) == ("mail.high", "tests.unit.test_rq_enqueue.send")
    assert (called["args"], called["kwargs"]) == ([7], {"language": "de"})


def test_rolled_back_there_is_no_job(session: Session) -> None:
    outbox.rq.enqueue(session, "mail", send, 7)
    session.flush()
    session.rollback()
    assert session.execute(sa.select(sa.func.count()).select_from(DEFAULT.message)).scalar_one() == 0


def test_options_go_with_the_job(session: Session) -> None:
    job_id = uuid4()
    options = JobOptions(
        job_id=str(job_id), key="o-7", delay=timedelta(minutes=1), timeout_s=60, retries=2, retry_intervals_s=(10, 60),
        result_ttl_s=-1, failure_ttl_s=5, description="mail", meta={"a": [1]}, at_front=True,
    )  # fmt: skip
    assert outbox.rq.enqueue(session, "mail", send, 7, options=options) == job_id
    found, sent = row(session), job(session)
    assert (found["key"], found["state"]) == ("o-7", "scheduled")
    assert sent == RqJob(
        queue="mail", function="tests.unit.test_rq_enqueue.send", args=[7], timeout_s=60, retries=2,
        retry_intervals_s=[10, 60], result_ttl_s=-1, failure_ttl_s=5, description="mail", meta={"a": [1]}, at_front=True,
    )  # fmt: skip


@pytest.mark.parametrize("queue", ["a b", "a:b", "ä", ".", "a..b"])
def test_a_queue_may_have_any_name(session: Session, queue: str) -> None:
    outbox.rq.enqueue(session, queue, send, 7)
    assert job(session).queue == queue


@pytest.mark.parametrize("value", [None, True, 2**70, 1.5, "ä", [1, [None]], {"a": {"b": []}}, Colour.RED])
def test_what_json_carries_arrives_as_it_was(session: Session, value: Any) -> None:
    outbox.rq.enqueue(session, "mail", "a.b", value, named=value)
    assert job(session).args == [value]
    assert job(session).kwargs == {"named": value}


@pytest.mark.parametrize(
    "value",
    [
        Decimal("1.10"), datetime.now(UTC), uuid4(), b"x", (1, 2), {1, 2}, {1: "a"}, object(), float("nan"), "\ud800",
        [{"a": (1,)}], Mail(),
    ],
)  # fmt: skip
def test_what_would_arrive_as_something_else_is_refused(session: Session, value: Any) -> None:
    with pytest.raises(InvalidEvent):
        outbox.rq.enqueue(session, "mail", "a.b", value)
    with pytest.raises(InvalidEvent):
        JobOptions(meta={"a": value}) if value != "\ud800" else outbox.rq.enqueue(session, "mail", "a.b", a=value)
    assert not session.new


def test_the_error_says_where_and_what_to_do(session: Session) -> None:
    with pytest.raises(InvalidEvent, match=r"args\[1\]\['price'\].*Decimal.*text instead of a Decimal"):
        outbox.rq.enqueue(session, "mail", "a.b", 1, {"price": Decimal(1)})


def test_what_is_nested_without_end_is_refused(session: Session) -> None:
    endless: list[Any] = []
    endless.append(endless)
    with pytest.raises(InvalidEvent, match="nested too deeply"):
        outbox.rq.enqueue(session, "mail", "a.b", endless)


@pytest.mark.parametrize("func", [send, Mail.send, "shop.mail.send"])
def test_a_function_is_sent_by_its_dotted_name(session: Session, func: Any) -> None:
    outbox.rq.enqueue(session, "mail", func, 7)
    assert job(session).function == (func if isinstance(func, str) else f"{__name__}.{func.__qualname__}")


@pytest.mark.parametrize("func", [lambda: None, Mail().bound, partial(send, 7), "send", "a.", "a b.c", "", object(), 7])
def test_what_a_worker_could_not_import_is_refused(session: Session, func: Any) -> None:
    with pytest.raises(InvalidEvent, match="func"):
        outbox.rq.enqueue(session, "mail", func)


def test_arguments_that_the_function_does_not_take_are_refused(session: Session) -> None:
    with pytest.raises(InvalidEvent, match=r"send\(order_id.*unexpected keyword argument 'job_timeout'"):
        outbox.rq.enqueue(session, "mail", send, 7, job_timeout=5)
    with pytest.raises(InvalidEvent, match="missing a required argument"):
        outbox.rq.enqueue(session, "mail", send)


@pytest.mark.parametrize(
    "options",
    [
        {"timeout_s": 0}, {"timeout_s": -2}, {"timeout_s": 1.5}, {"retries": -1}, {"retries": None}, {"retries": True},
        {"retry_intervals_s": [-1]}, {"retry_intervals_s": ["1"]}, {"result_ttl_s": -2}, {"failure_ttl_s": "1h"}, {"meta": [1]},
    ],
)  # fmt: skip
def test_options_that_rq_would_refuse_are_refused(options: Any) -> None:
    with pytest.raises(InvalidEvent, match=next(iter(options))):
        JobOptions(**options)


@pytest.mark.parametrize("queue", ["", None, 7])
def test_a_queue_needs_a_name(session: Session, queue: Any) -> None:
    with pytest.raises(InvalidEvent, match="queue"):
        outbox.rq.enqueue(session, queue, send, 7)


def test_an_async_session_takes_a_job_too(tmp_path: Path) -> None:
    from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine

    engine = create_async_engine(f"sqlite+aiosqlite:///{tmp_path / 'a.db'}")
    assert isinstance(outbox.rq.enqueue(AsyncSession(engine), "mail", send, 7), UUID)


@pytest.mark.parametrize(
    ("content_type", "payload"),
    [
        ("application/json", b"{}"), (CONTENT_TYPE, b"x"), (CONTENT_TYPE, b"[]"), (CONTENT_TYPE, b"7"), (CONTENT_TYPE, b"\xff"),
        (CONTENT_TYPE, b'{"queue": "a"}'), (CONTENT_TYPE, b'{"queue": "a", "function": "b", "new": 1}'),
    ],
)  # fmt: skip
def test_what_is_no_job_is_not_read_as_one(content_type: str, payload: bytes) -> None:
    with pytest.raises(NotAJob):
        read(content_type, payload)


def test_who_only_enqueues_needs_no_rq_and_who_publishes_is_told_what_to_install() -> None:
    program = """
import sys
sys.modules["rq"] = sys.modules["redis"] = None
import outbox.rq
from outbox.errors import MissingExtra
from outbox.publishers.factory import open_publisher
from outbox.routes import Routes
outbox.rq.JobOptions(retries=1)
try:
    open_publisher("rq+redis://h/0", Routes())
except MissingExtra as error:
    print(error)
"""
    run = subprocess.run([sys.executable, "-W", "error", "-c", program], capture_output=True, text=True, check=True)
    assert "pip install 'outbox-relay[rq]'" in run.stdout


def test_who_has_no_faststream_is_told_what_to_install() -> None:
    program = 'import sys; sys.modules["faststream"] = None; import outbox.faststream'
    run = subprocess.run([sys.executable, "-W", "error", "-c", program], capture_output=True, text=True, check=False)
    assert "pip install 'outbox-relay[faststream]'" in run.stderr
