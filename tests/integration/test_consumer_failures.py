"""Failing messages: tried again when it can help, given up when it cannot, and never in the way of others."""

import asyncio
import logging
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pydantic
import pytest
import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncSession, async_sessionmaker, create_async_engine
from sqlalchemy.orm import Session

from outbox import Inbox, Message
from outbox.backoff import Backoff
from outbox.errors import BrokerRefused, InvalidEvent
from outbox.inbox.errors import Permanent
from outbox.inbox.runner import Runner
from outbox.states import OnDead, RetryPolicy
from outbox.tables import DEFAULT
from tests.integration.consuming import WAIT_S, Shop, effects, record, running, until
from tests.servers.postgres import Postgres

SOON = Backoff(first_s=0.05, ceiling_s=0.1)
THRICE = RetryPolicy(max_attempts=3, backoff=SOON)
LATER = RetryPolicy(backoff=Backoff(first_s=3600, ceiling_s=3600, floor=1.0))


class OrderGone(Permanent):
    """The order is gone."""


class Refused(Exception):
    """The other side says no."""


@pytest.fixture
def shop(database_url: str, vhost_url: str) -> Iterator[Shop]:
    shop = Shop(database_url, vhost_url)
    yield shop
    shop.close()


def test_a_message_that_keeps_failing_is_given_up_with_every_failure_on_record(
    shop: Shop, caplog: pytest.LogCaptureFixture
) -> None:
    @shop.inbox.transactional("orders.*", retry=THRICE)
    def handle(session: Session, message: Message) -> None:
        record(session, message)
        if message.message_id == "bad":
            raise Refused("no \x00 today")

    shop.declare()
    shop.publish("bad", "good", headers={"outbox-key": "7", "trace": b"\x00"})
    with running(shop.inbox, shop.broker_url) as runner:
        until(lambda: runner.counts["dead"] == 1 and runner.counts["handled"] == 1)
    assert shop.effects() == ["good"]
    assert shop.queued() == 0
    (dead,) = shop.failed()
    assert (dead.state, dead.attempts, dead.error_class, dead.last_error) == ("dead", 3, "Refused", "no \\x00 today")
    assert [failure["error_class"] for failure in dead.failures] == ["Refused"] * 3
    assert (dead.key, dead.topic, dead.payload) == ("7", "orders.placed", b"{}")
    assert dead.dead_at >= dead.received_at
    assert [record.levelno for record in caplog.records if record.getMessage() == "message given up"] == [logging.ERROR]


@pytest.mark.parametrize("kind", ["permanent", "listed", "not to be tried again", "validation", "json"])
def test_what_can_never_succeed_is_given_up_at_the_first_failure(shop: Shop, kind: str) -> None:
    rules = {"listed": {"permanent": (Refused,)}, "not to be tried again": {"retry_on": (OSError,)}}

    @shop.inbox.transactional("orders.*", **rules.get(kind, {}))
    def handle(session: Session, message: Message) -> None:
        match kind:
            case "permanent":
                raise OrderGone
            case "validation":
                pydantic.TypeAdapter(int).validate_python("seven")
            case "json":
                Message("a", "t", b"{").json()
            case _:
                raise Refused

    shop.declare()
    shop.publish("a")
    with running(shop.inbox, shop.broker_url) as runner:
        until(lambda: runner.counts == {"dead": 1})
    (dead,) = shop.failed()
    assert (dead.state, dead.attempts) == ("dead", 1)


def test_a_copy_goes_to_the_dead_letter_topic_in_the_same_transaction(shop: Shop) -> None:
    inbox = shop.new_inbox(dead_letter_topic="dead.shipping")

    @inbox.transactional("orders.*")
    def handle(session: Session, message: Message) -> None:
        raise OrderGone

    shop.declare(inbox)
    shop.publish("a")
    with running(inbox, shop.broker_url) as runner:
        until(lambda: runner.counts == {"dead": 1})
    with shop.engine.connect() as connection:
        (letter,) = connection.execute(sa.select(DEFAULT.message))
    assert (letter.topic, letter.payload, letter.content_type) == ("dead.shipping", b"{}", "application/json")
    assert letter.headers["dead-message-id"] == "a"
    assert letter.headers["dead-error-class"] == "OrderGone"


def test_a_second_copy_of_a_message_that_waits_for_its_next_try_may_succeed(shop: Shop) -> None:
    tried = list[str]()

    @shop.inbox.transactional("orders.*", retry=RetryPolicy(backoff=Backoff(first_s=1, ceiling_s=1, floor=1.0)))
    def handle(session: Session, message: Message) -> None:
        tried.append(message.message_id)
        record(session, message)
        if len(tried) == 1:
            raise Refused

    shop.declare()
    shop.publish("a", "a")
    with running(shop.inbox, shop.broker_url) as runner:
        until(lambda: shop.effects() == ["a"])
        until(lambda: shop.failed() == [])
        until(lambda: runner.counts == {"retry": 1, "handled": 1, "duplicate": 1})
    assert tried == ["a", "a"]


def test_an_outage_of_the_database_spends_no_try(own_postgres: Postgres, vhost_url: str) -> None:
    shop = Shop(own_postgres.create_database(), vhost_url)
    entered, stopped, tried = threading.Event(), threading.Event(), list[str]()

    @shop.inbox.transactional("orders.*", retry=RetryPolicy(max_attempts=1))
    def handle(session: Session, message: Message) -> None:
        record(session, message)
        tried.append(message.message_id)
        if len(tried) == 1:
            entered.set()
            assert stopped.wait(WAIT_S)
            session.execute(sa.text("SELECT 1"))

    shop.declare()
    shop.publish("a")
    with running(shop.inbox, shop.broker_url) as runner:
        assert entered.wait(WAIT_S)
        own_postgres.restart()
        stopped.set()
        until(lambda: runner.counts["handled"] == 1)
    assert runner.counts["dead"] == 0
    assert shop.effects() == ["a"]
    assert shop.failed() == []
    shop.close()


KILLER = """
import os, signal, sys
import sqlalchemy as sa
from sqlalchemy.orm import sessionmaker
from outbox import Inbox
from outbox.backoff import Backoff
from outbox.states import RetryPolicy

inbox = Inbox("shipping", sessions=sessionmaker(sa.create_engine(os.environ["SHOP_DATABASE"])))
policy = RetryPolicy(max_attempts=3, backoff=Backoff(first_s=0.1, ceiling_s=0.1))

# The lease of a try whose process has died ends with the time limit and a margin; the test moves the clock instead.
@inbox.transactional("orders.*", retry=policy, time_limit_s=60)
def ship(session, message):
    session.execute(sa.text("INSERT INTO effects VALUES (:id)"), {"id": message.message_id})
    if message.message_id == "killer":
        os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_message_that_kills_the_process_is_counted_and_given_up_and_its_neighbours_are_handled(
    shop: Shop, tmp_path: Path
) -> None:
    shop.inbox.transactional("orders.*")(record)
    shop.declare()
    shop.publish("a", "killer", "b")
    (tmp_path / "app.py").write_text(KILLER)
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2]), "OUTBOX_BROKER_URL": shop.broker_url}
    env["SHOP_DATABASE"] = shop.engine.url.render_as_string(hide_password=False)
    command = [sys.executable, "-m", "outbox.cli.consume", "app:inbox"]
    deaths = 0
    for _ in range(10):
        if any(row.state == "dead" for row in shop.failed()):
            break
        with subprocess.Popen(command, cwd=tmp_path, env=env) as process:

            def is_over(process: subprocess.Popen[bytes] = process) -> bool:
                return process.poll() is not None or any(row.state == "dead" for row in shop.failed())

            with shop.engine.begin() as connection:
                connection.execute(sa.text("UPDATE failed_messages SET available_at = now() WHERE state = 'retry'"))
            until(is_over)
            process.terminate()
            deaths += process.wait(WAIT_S) == -signal.SIGKILL
    (dead,) = shop.failed()
    assert (dead.message_id, dead.state, dead.error_class) == ("killer", "dead", "ProcessDied")
    assert shop.effects() == ["a", "b"]
    assert shop.queued() == 0
    assert 3 <= deaths <= 4


def test_the_soft_limit_is_an_exception_in_the_handler(shop: Shop) -> None:
    @shop.inbox.transactional("orders.*", retry=THRICE, soft_limit_s=0.2)
    def handle(session: Session, message: Message) -> None:
        record(session, message)
        if message.message_id == "slow":
            while True:
                threading.Event().wait(0.01)

    shop.declare()
    shop.publish("slow", "good")
    with running(shop.inbox, shop.broker_url) as runner:
        until(lambda: runner.counts == {"retry": 2, "dead": 1, "handled": 1})
    (dead,) = shop.failed()
    assert dead.error_class == "TimeLimitExceeded"
    assert shop.effects() == ["good"]


def test_a_handler_past_its_hard_limit_is_given_up_and_can_no_longer_commit(shop: Shop) -> None:
    release, tried = threading.Event(), list[str]()

    @shop.inbox.transactional("orders.*", retry=LATER, time_limit_s=0.3)
    def handle(session: Session, message: Message) -> None:
        tried.append(message.message_id)
        if message.message_id == "stuck":
            release.wait(WAIT_S)  # as on a socket: no exception reaches it
        record(session, message)

    shop.declare()
    shop.publish("stuck", "good")
    with running(shop.inbox, shop.broker_url) as runner:
        until(lambda: runner.counts == {"retry": 1, "handled": 1})
        (failed,) = shop.failed()
        assert failed.error_class == "TimeLimitExceeded"
        assert "0.3 s" in failed.last_error
        release.set()
        until(lambda: sum(thread.name == "outbox-consume" for thread in threading.enumerate()) == 1)
        assert shop.effects() == ["good"]  # what it did after all was rolled back
        with shop.engine.begin() as connection:
            connection.execute(sa.text("UPDATE failed_messages SET available_at = now()"))
        until(lambda: shop.effects() == ["good", "stuck"])
        until(lambda: shop.failed() == [])
    assert tried.count("stuck") == 2


@pytest.mark.parametrize("limit", [{"soft_limit_s": 0.2}, {"time_limit_s": 0.2}])
def test_an_async_handler_past_its_limit_is_cancelled(shop: Shop, database_url: str, limit: dict[str, float]) -> None:
    inbox = Inbox("shipping", sessions=async_sessionmaker(create_async_engine(database_url)))

    @inbox.transactional("orders.*", retry=LATER, **limit)
    async def handle(session: AsyncSession, message: Message) -> None:
        await session.execute(effects.insert().values(message_id=message.message_id))
        if message.message_id == "slow":
            await asyncio.Event().wait()

    shop.declare(inbox)
    shop.publish("slow", "good")
    with running(inbox, shop.broker_url) as runner:
        until(lambda: runner.counts == {"retry": 1, "handled": 1})
    assert shop.effects() == ["good"]
    assert shop.failed()[0].error_class == "TimeLimitExceeded"


def test_a_key_waits_for_its_failing_message_and_others_do_not(shop: Shop) -> None:
    inbox, order, fail = shop.new_inbox(ordered=True), list[str](), threading.Event()

    @inbox.transactional("orders.*", retry=RetryPolicy(max_attempts=100, backoff=SOON))
    def handle(session: Session, message: Message) -> None:
        if message.message_id == "k1" and not fail.is_set():
            raise Refused
        record(session, message)
        order.append(message.message_id)

    shop.declare(inbox)
    for number in range(1, 6):
        shop.publish(f"k{number}", headers={"outbox-key": "k"})
        shop.publish(f"other{number}", headers={"outbox-key": f"o{number}"})
    with running(inbox, shop.broker_url, workers=4) as runner:
        until(lambda: sum(name.startswith("other") for name in order) == 5)
        until(lambda: runner.counts["waiting"] == 4)
        assert not any(name.startswith("k") for name in order)
        fail.set()
        until(lambda: len(order) == 10)
        until(lambda: shop.failed() == [])
    assert [name for name in order if name.startswith("k")] == ["k1", "k2", "k3", "k4", "k5"]


@pytest.mark.parametrize(("on_dead", "handled"), [(OnDead.BLOCK, []), (OnDead.SKIP, ["k2", "k3"])])
def test_what_a_dead_message_does_to_its_key(shop: Shop, on_dead: OnDead, handled: list[str]) -> None:
    inbox = shop.new_inbox(ordered=True)

    @inbox.transactional("orders.*", retry=RetryPolicy(max_attempts=2, backoff=SOON, on_dead=on_dead))
    def handle(session: Session, message: Message) -> None:
        if message.message_id == "k1":
            raise Refused
        record(session, message)

    shop.declare(inbox)
    shop.publish("k1", "k2", headers={"outbox-key": "k"})
    with running(inbox, shop.broker_url, workers=4) as runner:
        until(lambda: runner.counts["dead"] == 1)
        shop.publish("k3", headers={"outbox-key": "k"})
        until(lambda: runner.counts["waiting"] + runner.counts["handled"] >= 2)
        until(lambda: shop.effects() == handled)
        until(lambda: len(shop.failed()) == 3 - len(handled))
    states = {row.message_id: row.state for row in shop.failed()}
    assert states == {"k1": "dead"} | {name: "blocked" for name in ("k2", "k3") if name not in handled}


def test_one_worker_at_a_time_has_a_key_and_all_keys_move(shop: Shop) -> None:
    inbox, busy, lock = shop.new_inbox(ordered=True), set[str | None](), threading.Lock()
    order: dict[str | None, list[str]] = {}

    @inbox.transactional("orders.*")
    def handle(session: Session, message: Message) -> None:
        with lock:
            assert message.key not in busy
            busy.add(message.key)
        record(session, message)
        session.flush()
        with lock:
            order.setdefault(message.key, []).append(message.message_id)
            busy.discard(message.key)

    shop.declare(inbox)
    for number in range(40):
        shop.publish(f"{number:02}", headers={"outbox-key": str(number % 4)})
    with running(inbox, shop.broker_url, workers=4) as runner:
        until(lambda: runner.counts["handled"] == 40)
    assert all(names == sorted(names) and len(names) == 10 for names in order.values())


def _flood(shop: Shop, *, good: int, poison: int, workers: int) -> None:
    @shop.inbox.transactional("orders.*", retry=RetryPolicy(max_attempts=3, backoff=SOON))
    def handle(session: Session, message: Message) -> None:
        record(session, message)
        if message.message_id.startswith("bad"):
            raise Refused

    shop.declare()
    each = good // poison
    names = [name for number in range(poison) for name in (f"bad{number}", *(f"{number}-{n}" for n in range(each)))]
    shop.publish(*names)
    with running(shop.inbox, shop.broker_url, workers=workers) as runner:
        until(lambda: runner.counts["handled"] == poison * each and runner.counts["dead"] == poison, within_s=300)
    assert shop.effects() == sorted(name for name in names if not name.startswith("bad"))
    dead = shop.failed()
    assert {row.state for row in dead} == {"dead"}
    assert {(row.attempts, len(row.failures), row.error_class) for row in dead} == {(3, 3, "Refused")}
    assert shop.queued() == 0


def test_poison_among_good_ones_ends_in_the_dead_letters_and_the_good_ones_are_handled(shop: Shop) -> None:
    _flood(shop, good=600, poison=60, workers=4)


@pytest.mark.matrix
@pytest.mark.timeout(400)
def test_a_thousand_poison_messages_among_ten_thousand_good_ones(shop: Shop) -> None:
    _flood(shop, good=10_000, poison=1000, workers=4)


def test_a_queue_that_cannot_keep_the_order_is_refused(shop: Shop) -> None:
    shop.inbox.transactional("orders.*")(record)
    shop.declare()  # by an inbox that is not ordered
    inbox = shop.new_inbox(ordered=True)
    inbox.transactional("orders.*")(record)
    with pytest.raises(BrokerRefused, match="x-single-active-consumer"):
        Runner(inbox, shop.broker_url).run(threading.Event())


def test_of_two_ordered_consumers_one_stands_by_and_takes_over(shop: Shop) -> None:
    inbox, order = shop.new_inbox(ordered=True), list[str]()

    @inbox.transactional("orders.*", retry=RetryPolicy(max_attempts=50, backoff=SOON))
    def handle(session: Session, message: Message) -> None:
        if len(order) % 3 == 0 and not message.redelivered:
            raise Refused
        record(session, message)
        session.flush()
        order.append(message.message_id)

    shop.declare(inbox)
    names = [f"{number:03}" for number in range(60)]
    shop.publish(*names[:30], headers={"outbox-key": "k"})
    with running(inbox, shop.broker_url, workers=3) as standby:
        with running(inbox, shop.broker_url, workers=3):
            until(lambda: len(order) >= 10)
            shop.publish(*names[30:], headers={"outbox-key": "k"})
        until(lambda: len(order) == 60)
        until(lambda: shop.failed() == [])
        assert standby.counts["handled"] > 0
    assert order == names


@pytest.mark.parametrize("raises", [False, True])
def test_a_child_that_a_handler_has_forked_has_no_part_in_its_transaction(shop: Shop, tmp_path: Path, *, raises: bool) -> None:
    (tmp_path / "app.py").write_text(FORKING)
    shop.inbox.transactional("orders.*")(record)
    shop.declare()
    shop.publish("a", "b")
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2]), "OUTBOX_BROKER_URL": shop.broker_url}
    env |= {"SHOP_DATABASE": shop.engine.url.render_as_string(hide_password=False), "SHOP_CHILD_RAISES": "x" * raises}
    command = [sys.executable, "-W", "ignore", "-m", "outbox.cli.consume", "app:inbox"]
    with subprocess.Popen(command, cwd=tmp_path, env=env, stderr=subprocess.PIPE, text=True) as process:
        until(lambda: shop.effects() == ["a", "b"])
        until(lambda: shop.queued() == 0)
        process.terminate()
        _, said = process.communicate(timeout=WAIT_S)
    assert process.returncode == 0
    assert said.count("a handler has forked") == 2
    assert said.count("INFO outbox.inbox stopped") == 1
    assert shop.effects() == ["a", "b"]
    assert shop.failed() == []


FORKING = """
import os
import sqlalchemy as sa
from sqlalchemy.orm import sessionmaker
from outbox import Inbox

inbox = Inbox("shipping", sessions=sessionmaker(sa.create_engine(os.environ["SHOP_DATABASE"])))

@inbox.transactional("orders.*")
def ship(session, message):
    session.execute(sa.text("INSERT INTO effects VALUES (:id)"), {"id": message.message_id})
    child = os.fork()
    if child:
        os.waitpid(child, 0)
    elif os.environ["SHOP_CHILD_RAISES"]:
        raise RuntimeError("in the child")
"""


@pytest.mark.parametrize("then", ["raises", "goes on", "returns"])
def test_a_handler_that_commits_by_itself_and_fails_after_that_is_not_passed_over_in_silence(shop: Shop, then: str) -> None:
    @shop.inbox.transactional("orders.*")
    def handle(session: Session, message: Message) -> None:
        record(session, message)
        session.commit()
        if then == "raises":
            raise Refused
        if then == "goes on":
            session.execute(sa.text("SELECT 1"))

    shop.declare()
    shop.publish("a")
    with running(shop.inbox, shop.broker_url) as runner:
        until(lambda: runner.counts == {"dead": 1})
    assert shop.effects() == ["a"]
    (dead,) = shop.failed()
    assert "committed by itself" in dead.last_error
    assert dead.error_class == {"raises": "Refused", "goes on": "InvalidRequestError", "returns": "NoTransaction"}[then]


def test_a_copy_that_would_be_no_event_does_not_keep_a_message_from_being_given_up(shop: Shop) -> None:
    inbox = shop.new_inbox(dead_letter_topic="dead.shipping")

    @inbox.transactional("orders.*")
    def handle(session: Session, message: Message) -> None:
        raise OrderGone("x\ny \x00" * 900)

    shop.declare(inbox)
    shop.publish("a", body=b"x" * (16 * 1024 * 1024 + 1))
    with running(inbox, shop.broker_url) as runner:
        until(lambda: runner.counts == {"dead": 1})
    with shop.engine.connect() as connection:
        assert connection.execute(sa.select(DEFAULT.message)).all() == []
    with pytest.raises(InvalidEvent):
        shop.new_inbox(dead_letter_topic="not a topic")


DYING = """
import os, signal
import sqlalchemy as sa
from sqlalchemy.orm import sessionmaker
from outbox import Inbox, points

inbox = Inbox("shipping", sessions=sessionmaker(sa.create_engine(os.environ["SHOP_DATABASE"])))

@inbox.transactional("orders.*")
def ship(session, message):
    session.execute(sa.text("INSERT INTO effects VALUES (:id)"), {"id": message.message_id})
    if os.environ["SHOP_DIES_AT"] == "before failure":
        raise RuntimeError("fails")

def die(point):
    if point == os.environ["SHOP_DIES_AT"]:
        os.kill(os.getpid(), signal.SIGKILL)

points.hook = die
"""


@pytest.mark.parametrize("deaths", [["before failure"], ["before commit", "after count"], ["before commit", "before failure"]])
def test_a_kill_around_a_failure_leaves_one_effect_in_the_end(shop: Shop, tmp_path: Path, deaths: list[str]) -> None:
    (tmp_path / "app.py").write_text(DYING)
    shop.inbox.transactional("orders.*")(record)
    shop.declare()
    shop.publish("a")
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2]), "OUTBOX_BROKER_URL": shop.broker_url}
    env["SHOP_DATABASE"] = shop.engine.url.render_as_string(hide_password=False)
    for point in deaths:
        command = [sys.executable, "-m", "outbox.cli.consume", "app:inbox"]
        died = subprocess.run(command, cwd=tmp_path, env={**env, "SHOP_DIES_AT": point}, timeout=WAIT_S, check=False)
        assert died.returncode == -signal.SIGKILL
        assert shop.effects() == []
        until(lambda: shop.queued() == 1)
    with running(shop.inbox, shop.broker_url):
        until(lambda: shop.effects() == ["a"])
        until(lambda: shop.failed() == [] and shop.queued() == 0)
    assert shop.effects() == ["a"]
