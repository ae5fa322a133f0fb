"""Calls of Celery tasks in a unit of work: what is in the outbox, and what was not contacted for it."""

import asyncio
import json
import socket

import celery
import kombu
import pytest
import sqlalchemy as sa
from celery import chain, chord, group
from celery.signals import before_task_publish
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.orm import scoped_session, sessionmaker

import outbox
from outbox.celery import NotThroughOutbox, NoUnitOfWork, OutboxCelery, Outside, direct, launch, unit_of_work
from outbox.celery.rows import topic_of
from outbox.tables import DEFAULT
from outbox.topics import is_topic
from outbox.wire import DELIVERY_HEADER


@pytest.fixture(autouse=True)
def no_network(monkeypatch):
    """Neither the broker nor the result backend is contacted in any of these tests."""

    def connect(self, address):
        pytest.fail(f"connected to {address}")

    monkeypatch.setattr(socket.socket, "connect", connect)


@pytest.fixture
def engine():
    engine = sa.create_engine("sqlite://", poolclass=sa.StaticPool)
    outbox.metadata.create_all(engine)
    yield engine
    engine.dispose()


@pytest.fixture
def sessions(engine):
    return sessionmaker(engine)


def new_app(backend="redis://127.0.0.1:1/0", **options):
    app = OutboxCelery("shop", broker="amqp://127.0.0.1:1//", backend=backend, set_as_current=False, **options)

    @app.task(name="shop.add", shared=False)
    def add(one, other):
        return one + other

    return app


@pytest.fixture
def app():
    return new_app()


@pytest.fixture
def add(app):
    return app.tasks["shop.add"]


def rows(engine):
    with engine.connect() as connection:
        return connection.execute(sa.select(DEFAULT.message).order_by(DEFAULT.message.c.id)).all()


def deliveries(engine):
    return [row.headers[DELIVERY_HEADER] for row in rows(engine)]


def bodies(engine):
    return [json.loads(row.payload) for row in rows(engine)]


CALLS = {
    "delay": lambda add: add.delay(1, 2),
    "apply_async": lambda add: add.apply_async((1, 2)),
    "send_task": lambda add: add.app.send_task("shop.add", (1, 2)),
    "signature": lambda add: add.s(1, 2).delay(),
    "chain": lambda add: chain(add.s(1, 2), add.s(3), add.s(4)).delay(),
    "unknown task": lambda add: add.app.send_task("other.task", (1, 2)),
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
@pytest.mark.parametrize("backend", ["redis://127.0.0.1:1/0", "rpc://", "db+sqlite://", "cache+memory://", None])
def test_a_call_is_one_message_of_the_transaction(engine, sessions, call, backend):
    add = new_app(backend).tasks["shop.add"]
    with sessions.begin() as session, unit_of_work(session) as work:
        result = call(add)
        assert result.id
        assert rows(engine) == []
    [row] = rows(engine)
    assert [row.message_id] == work.message_ids
    assert row.topic.startswith("celery.")
    [[args, kwargs, _]] = bodies(engine)
    assert (args, kwargs) == ([1, 2], {})


def test_what_is_rolled_back_is_not_there(engine, sessions, add):
    with sessions() as session, unit_of_work(session):
        add.delay(1, 2)
        session.flush()
        session.rollback()
    with sessions.begin() as session:
        with unit_of_work(session):
            add.delay(3, 4)
        with unit_of_work(session), session.begin_nested() as savepoint:
            add.delay(5, 6)
            savepoint.rollback()
    assert [body[0] for body in bodies(engine)] == [[3, 4]]


def test_a_group_is_one_message_for_each_task(engine, sessions, add):
    with sessions.begin() as session, unit_of_work(session):
        result = group(add.s(number, 1) for number in range(3)).delay()
    found = deliveries(engine)
    assert [each["headers"]["id"] for each in found] == [each.id for each in result.results]
    assert {each["headers"]["group"] for each in found} == {result.id}


def test_a_connection_and_a_scoped_session_take_tasks(engine, sessions, add):
    with engine.begin() as connection, unit_of_work(connection):
        add.delay(1, 2)
    scoped = scoped_session(sessions)
    with unit_of_work(scoped):
        add.delay(3, 4)
    scoped.commit()
    scoped.remove()
    assert len(rows(engine)) == 2


async def enqueue_async(path, add):
    engine = create_async_engine(f"sqlite+aiosqlite:///{path}")
    async with AsyncSession(engine) as session, session.begin():
        with unit_of_work(session):
            add.delay(1, 2)
    async with engine.connect() as connection:
        with pytest.raises(TypeError, match="AsyncConnection"), unit_of_work(connection):
            pass
    await engine.dispose()


def test_an_async_session_takes_tasks(tmp_path, add, monkeypatch):
    engine = sa.create_engine(f"sqlite:///{tmp_path / 'db'}")
    outbox.metadata.create_all(engine)
    monkeypatch.undo()  # the event loop wakes itself through a socket
    asyncio.run(enqueue_async(tmp_path / "db", add))
    assert len(rows(engine)) == 1
    engine.dispose()


def test_the_key_orders_the_tasks_of_a_unit_of_work(engine, sessions, add):
    with sessions.begin() as session, unit_of_work(session, key="order 1"):
        add.delay(1, 2)
        add.delay(3, 4)
    assert [row.key for row in rows(engine)] == ["order 1", "order 1"]
    with sessions() as session, pytest.raises(outbox.InvalidEvent, match="key"), unit_of_work(session, key=""):
        pass


def test_a_task_outside_a_unit_of_work_is_an_error(add):
    with pytest.raises(NoUnitOfWork, match="unit_of_work"):
        add.delay(1, 2)
    with pytest.raises(NoUnitOfWork):
        group(add.s(1, 2), add.s(3, 4)).delay()


@pytest.mark.parametrize("outside", Outside)
def test_a_call_said_to_be_direct_goes_to_the_broker_at_once(engine, sessions, outside):
    app = new_app(None, outside=outside)
    app.conf.broker_url = "memory://"
    add = app.tasks["shop.add"]
    with sessions.begin() as session, unit_of_work(session), direct():
        add.apply_async((1, 2), ignore_result=True, queue="at once")
    if outside is Outside.DIRECT:
        group(add.s(3, 4).set(ignore_result=True, queue="at once")).delay()
    with app.connection_for_write() as connection:
        received = list(iter(kombu.Queue("at once", channel=connection.channel()).get, None))
    assert [message.payload[0] for message in received] == [[1, 2], [3, 4]][: 1 if outside is Outside.REFUSED else 2]
    assert rows(engine) == []


def test_an_option_that_publishes_at_once_is_refused(sessions, app, add):
    with sessions() as session, unit_of_work(session), app.connection_for_write() as connection:
        with pytest.raises(NotThroughOutbox, match="connection="):
            add.apply_async((1, 2), connection=connection)
        with pytest.raises(NotThroughOutbox, match="producer="):
            add.apply_async((1, 2), producer=app.amqp.Producer(connection, auto_declare=False))


def test_pickle_is_refused(engine, sessions, add):
    with sessions.begin() as session, unit_of_work(session), pytest.raises(outbox.InvalidEvent, match="pickle"):
        add.apply_async((1, 2), serializer="pickle")
    assert rows(engine) == []


@pytest.mark.parametrize(
    ("headers", "problem"),
    [({"a": b"\xff"}, "no form"), ({"a": 2**63}, "64 bits"), ({"a": "\0"}, "NUL"), ({"a": "x" * 100_000}, "more than")],
)
def test_headers_that_no_broker_carries_are_refused_at_the_call(sessions, add, headers, problem):
    with sessions() as session, unit_of_work(session), pytest.raises(outbox.InvalidEvent, match=problem):
        add.apply_async((1, 2), headers=headers)


def test_a_chord_that_the_backend_counts_is_refused_and_can_be_launched(engine, sessions, add):
    canvas = chord([add.s(1, 2), add.s(3, 4)], add.s(5))
    with sessions() as session, unit_of_work(session), pytest.raises(NotThroughOutbox, match="launch"):
        canvas.delay()
    with sessions.begin() as session, unit_of_work(session):
        result = launch(canvas, countdown=5)
    [delivery], [body] = deliveries(engine), bodies(engine)
    assert delivery["headers"]["task"] == "celery.chord"
    assert delivery["headers"]["eta"] is not None
    assert body[1]["task_id"] == result.id
    assert [each["options"]["task_id"] for each in body[1]["header"]] == [each.id for each in result.parent.results]
    with pytest.raises(TypeError, match="chord"):
        launch(add.s(1, 2))


def test_a_chord_on_a_backend_that_polls_goes_through_whole(engine, sessions):
    add = new_app("db+sqlite://").tasks["shop.add"]
    with sessions.begin() as session, unit_of_work(session):
        chord([add.s(1, 2), add.s(3, 4)], add.s(5)).delay()
    assert sorted(each["headers"]["task"] for each in deliveries(engine)) == ["celery.chord_unlock", "shop.add", "shop.add"]


def test_native_delayed_delivery_keeps_the_routing_key_apart_from_the_delay(engine, sessions):
    app = new_app()
    exchange = kombu.Exchange("jobs", type="topic")
    app.conf.task_queues = [
        kombu.Queue("jobs", exchange, routing_key="jobs.all", queue_arguments={"x-queue-type": "quorum"}),
    ]
    app.conf.task_default_queue = "jobs"
    add = app.tasks["shop.add"]
    with sessions.begin() as session, unit_of_work(session):
        add.apply_async((1, 2), countdown=100)
    [delivery] = deliveries(engine)
    assert delivery["exchange"] == "celery_delayed_27"
    assert (delivery["routing_key"], delivery["delay_s"]) == ("jobs.all", 100)


def test_signals_before_the_publish_change_the_headers(engine, sessions, add):
    def sign(headers, **_):
        headers["signed"] = "yes"

    before_task_publish.connect(sign)
    try:
        with sessions.begin() as session, unit_of_work(session):
            add.delay(1, 2)
    finally:
        before_task_publish.disconnect(sign)
    [delivery] = deliveries(engine)
    assert delivery["headers"]["signed"] == "yes"


def test_the_event_that_a_task_was_sent_stays_away(engine, sessions):
    app = new_app()
    app.conf.task_send_sent_event = True
    with sessions.begin() as session, unit_of_work(session):
        app.tasks["shop.add"].delay(1, 2)
    assert len(rows(engine)) == 1


def test_eager_tasks_run_at_once_and_nothing_is_enqueued(engine, sessions, caplog):
    app = new_app()
    app.conf.task_always_eager = True
    with sessions.begin() as session, unit_of_work(session):
        assert app.tasks["shop.add"].delay(1, 2).get() == 3
    assert rows(engine) == []
    assert "task_always_eager" in caplog.text


def test_a_base_that_is_not_ours_is_refused():
    app = new_app()

    class Foreign(celery.Task):
        pass

    @app.task(name="shop.other", base=Foreign, shared=False)
    def other():
        pass

    with pytest.raises(outbox.ConfigurationError, match=r"class Foreign\(outbox.celery.Task\)"):
        app.finalize()


@pytest.mark.parametrize("name", ["proj.tasks.add", "tasks.add[1]", "..", "ä", "a" * 400, "a b.c"])
def test_every_task_has_a_topic(name):
    assert is_topic(topic_of(name))
    assert topic_of(name).startswith("celery.")


def test_no_header_of_an_event_can_be_a_delivery():
    with pytest.raises(outbox.InvalidEvent, match="outbox-"):
        outbox.Event(topic="a", payload=1, headers={DELIVERY_HEADER: "x"})
