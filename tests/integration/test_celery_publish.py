"""What the relay publishes of Celery is what Celery publishes: judged by a plain client, and by a worker that knows nothing of us."""

import json
import re
from datetime import UTC, datetime, timedelta
from itertools import chain as chain_of

import kombu
import pytest
import sqlalchemy as sa
from celery import Celery, chain, chord, group

import outbox
from outbox.celery import OutboxCelery, launch, unit_of_work
from outbox.migrations import LATEST
from outbox.migrations.sql import apply
from outbox.publishers.rabbitmq import RabbitMQPublisher
from outbox.routes import Routes
from outbox.states import Outcome
from outbox.store import claim
from outbox.tables import DEFAULT
from tests.celery_shop import configured
from tests.faults import processes
from tests.integration.consuming import until
from tests.integration.test_kombu_publisher import Steer

UUID = re.compile(r"[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}")
TIME = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(?:\.\d+)?(?:\+00:00)?")
SOON = datetime(2100, 1, 2, 3, 4, 5, tzinfo=UTC)

CALLS = {
    "delay": lambda add, queue: add.apply_async((1, 2), queue=queue),
    "kwargs": lambda add, queue: add.apply_async((), {"one": "ä", "other": "€"}, queue=queue),
    "countdown": lambda add, queue: add.apply_async((1, 2), queue=queue, countdown=100),
    "eta": lambda add, queue: add.apply_async((1, 2), queue=queue, eta=SOON),
    "expires": lambda add, queue: add.apply_async((1, 2), queue=queue, expires=100),
    "expires at": lambda add, queue: add.apply_async(
        (1, 2), queue=queue, expires=datetime.now(UTC) + timedelta(days=30), countdown=1
    ),
    "priority": lambda add, queue: add.apply_async((1, 2), queue=queue, priority=3),
    "headers": lambda add, queue: add.apply_async((1, 2), queue=queue, headers={"custom": {"a": [1, None, True, 1.5]}}),
    "serializer": lambda add, queue: add.apply_async(("x", "y"), queue=queue, serializer="rot13"),
    "compression": lambda add, queue: add.apply_async((1, 2), queue=queue, compression="zlib"),
    "ids": lambda add, queue: add.apply_async((1, 2), queue=queue, task_id="mine", reply_to="there", shadow="other"),
    "limits": lambda add, queue: add.apply_async((1, 2), queue=queue, time_limit=20, soft_time_limit=10.5),
    "ignored": lambda add, queue: add.apply_async((1, 2), queue=queue, ignore_result=True),
    "transient": lambda add, queue: add.apply_async((1, 2), queue=queue, delivery_mode="transient"),
    "property": lambda add, queue: add.apply_async((1, 2), queue=queue, app_id="shop", user_id="guest"),
    "link": lambda add, queue: add.apply_async((1, 2), queue=queue, link=add.s(3), link_error=add.s(4)),
    "chain": lambda add, queue: chain(add.s(1, 2), add.s(3), add.s(4)).apply_async(queue=queue),
    "group": lambda add, queue: group(add.s(1, 2), add.s(3, 4)).apply_async(queue=queue),
    "group in chain": lambda add, queue: chain(add.s(1, 2), group(add.s(1), add.s(2))).apply_async(queue=queue),
    "stamps": lambda add, queue: stamped(add.s(1, 2)).apply_async(queue=queue),
    "send_task": lambda add, queue: add.app.send_task("elsewhere.task", (1, 2), queue=queue),
    "exchange": lambda add, queue: add.apply_async((1, 2), queue=queue, routing_key="jobs.a"),
}


def stamped(signature):
    signature.stamp(order="17")
    return signature


@pytest.fixture(params=["rabbitmq", "redis"])
def broker_url(request):
    return request.getfixturevalue({"rabbitmq": "vhost_url", "redis": "redis_url"}[request.param])


@pytest.fixture
def engine(database_url):
    engine = sa.create_engine(database_url)
    with engine.begin() as connection:
        apply(connection, range(1, LATEST + 1))
    yield engine
    engine.dispose()


def take_all(broker_url, queues):
    """Take everything out of the queues that exist."""
    with kombu.Connection(broker_url) as connection:
        channel = connection.channel()
        taken = {queue: list(iter(kombu.Queue(queue, channel=channel).get, None)) for queue in queues}
        for message in chain_of(*taken.values()):
            message.ack()
        return taken


def seen(message):
    """Return what a message is to whoever receives it, without what is another one at every publish."""
    properties = {name: value for name, value in message.properties.items() if name not in ("message_id", "delivery_tag")}
    body = message.body if isinstance(message.body, bytes) else message.body.encode()
    expiration = properties.pop("expiration", None)
    whole = {
        "body": body.decode(),
        "content": [message.content_type, message.content_encoding],
        "headers": message.headers,
        "properties": properties,
        "to": [message.delivery_info.get("exchange"), message.delivery_info.get("routing_key")],
    }
    ids = {}
    text = UUID.sub(lambda found: ids.setdefault(found[0], f"id{len(ids)}"), json.dumps(whole, sort_keys=True))
    return json.loads(TIME.sub("TIME", text)), expiration


def test_a_plain_client_receives_what_celery_itself_would_have_published(engine, database_url, broker_url):
    queues = {name: "jobs" if name == "exchange" else f"queue {name}" for name in CALLS}
    plain = configured(Celery, broker_url, None).tasks["shop.add"]
    for name, call in CALLS.items():
        call(plain, queues[name])
    plain.app.close()
    expected = take_all(broker_url, queues.values())

    shop = configured(OutboxCelery, broker_url, None).tasks["shop.add"]
    with engine.begin() as connection, unit_of_work(connection):
        for name, call in CALLS.items():
            call(shop, queues[name])
    relay(engine, database_url, broker_url)
    arrived = take_all(broker_url, queues.values())

    for name, queue in queues.items():
        assert len(expected[queue]) == len(arrived[queue]) > 0, name
        for one, other in zip(in_order(expected[queue]), in_order(arrived[queue]), strict=True):
            (seen_one, expires_one), (seen_other, expires_other) = seen(one), seen(other)
            assert seen_one == seen_other, name
            assert abs(int(expires_one or 0) - int(expires_other or 0)) < 30_000, name
            assert other.properties["message_id"]
            assert not [header for header in other.headers if header.startswith("outbox-")]


def in_order(messages):
    """Return the tasks of a group in their order: without a key there is none between messages."""
    return sorted(messages, key=lambda message: message.headers["argsrepr"])


def relay(engine, database_url, broker_url):
    """Run a relay until the outbox is empty."""
    with processes.relay("relay", database_url, broker_url) as program:
        program.wait_until_ready()
        until(lambda: left(engine) == 0)
        assert program.terminate() == 0


def left(engine):
    with engine.connect() as connection:
        return connection.execute(sa.text("SELECT count(*) FROM outbox_message")).scalar_one()


def publish(engine, broker_url):
    """Publish once what is in the outbox, and return what became of it."""
    with engine.connect() as connection:
        rows = claim.unsent(connection, DEFAULT, range(64), limit=100).rows
    publisher = RabbitMQPublisher(broker_url, Routes())
    publisher.connect()
    published = publisher.publish(rows, Steer())
    publisher.close()
    assert published.lost is None
    return [published.verdicts[row.id].outcome for row in rows]


def test_what_has_waited_in_the_outbox_expires_no_later_for_it(engine, vhost_url):
    add = configured(OutboxCelery, vhost_url, None).tasks["shop.add"]
    with engine.begin() as connection, unit_of_work(connection):
        add.apply_async((1, 2), expires=1000)
        add.apply_async((3, 4), expires=100)
        connection.execute(sa.text("UPDATE outbox_message SET created_at = created_at - interval '900 s'"))
    publish(engine, vhost_url)
    [first] = take_all(vhost_url, ["celery"])["celery"]  # the second is expired, which the broker has dropped
    assert first.payload[0] == [1, 2]
    assert 0 < int(first.properties["expiration"]) <= 100_000


def test_a_native_delay_is_what_is_left_of_it(engine, vhost_url):
    with kombu.Connection(vhost_url) as connection, connection.channel() as channel:
        exchange = kombu.Exchange("celery_delayed_27", type="topic")(channel)
        exchange.declare()
        kombu.Queue("late", exchange, routing_key="#", channel=channel).declare()
    app = configured(OutboxCelery, vhost_url, None)
    app.conf.task_queues = [
        kombu.Queue("work", kombu.Exchange("work", type="topic"), "work.a", queue_arguments={"x-queue-type": "quorum"})
    ]
    app.conf.task_default_queue = "work"
    with engine.begin() as connection, unit_of_work(connection):
        app.tasks["shop.add"].apply_async((1, 2), countdown=1000)
        app.tasks["shop.add"].apply_async((1, 2), countdown=100)
        connection.execute(sa.text("UPDATE outbox_message SET created_at = created_at - interval '900 s'"))
    publish(engine, vhost_url)
    keys = [message.delivery_info["routing_key"] for message in take_all(vhost_url, ["late"])["late"]]
    assert [key.removeprefix("0." * 21).count(".") for key in keys] == [8, 8]
    delays = sorted(int("".join(key.split(".")[:28]), 2) for key in keys)
    assert delays[0] == 0
    assert 60 <= delays[1] <= 100
    assert {".".join(key.split(".")[28:]) for key in keys} == {"work.a"}


def test_a_queue_that_is_there_otherwise_is_used_as_it_is(engine, vhost_url):
    with kombu.Connection(vhost_url) as connection, connection.channel() as channel:
        channel.queue_declare("celery", durable=True, auto_delete=False, arguments={"x-max-priority": 3})
    add = configured(OutboxCelery, vhost_url, None).tasks["shop.add"]
    with engine.begin() as connection, unit_of_work(connection):
        add.delay(1, 2)
    publish(engine, vhost_url)
    with kombu.Connection(vhost_url) as connection, connection.channel() as channel:
        assert channel.queue_declare("celery", passive=True).message_count == 1


@pytest.mark.parametrize("broker_url", ["rabbitmq", pytest.param("redis", marks=pytest.mark.matrix)], indirect=True)
def test_a_plain_worker_runs_everything_that_came_through_the_outbox(engine, database_url, broker_url, redis):
    results_url = redis.create_keyspace()
    app = configured(OutboxCelery, broker_url, results_url)
    add, total, headers = (app.tasks[f"shop.{name}"] for name in ("add", "total", "headers"))
    with engine.begin() as connection, unit_of_work(connection):
        called = {
            "plain": (add.delay(1, 2), 3),
            "chain": (chain(add.s(1, 2), add.s(3), add.s(4)).delay(), 10),
            "group": (group(add.s(1, 2), add.s(3, 4)).delay(), [3, 7]),
            "chord": (launch(chord([add.s(1, 2), add.s(3, 4)], total.s())), 10),
            "chord in chain": (chain(add.s(1, 1), group(add.s(1), add.s(2)), total.s()).delay(), 7),
            "countdown": (add.apply_async((5, 6), countdown=1), 11),
            "serializer": (add.apply_async(("a", "b"), serializer="rot13"), "ab"),
            "compression": (add.apply_async(("c", "d"), compression="bzip2"), "cd"),
            "exchange": (add.apply_async((7, 8), queue="jobs", routing_key="jobs.b"), 15),
            "headers": (
                headers.apply_async(headers={"custom": "x"}, priority=4, task_id="mine"),
                {"custom": "x", "priority": 4, "id": "mine"},
            ),
        }
        expired = add.apply_async((1, 2), expires=datetime.now(UTC) - timedelta(seconds=5))
    environment = {"OUTBOX_BROKER_URL": broker_url, "RESULTS": results_url, "OUTBOX_DATABASE_URL": database_url}
    command = ("-m", "celery", "-A", "tests.celery_shop:plain", "worker", "--without-gossip", "--without-mingle", "-l", "INFO")
    with processes.Program("worker", command, environment, ready="ready.") as worker:
        relay(engine, database_url, broker_url)
        worker.wait_until_ready()
        for name, (result, value) in called.items():
            assert result.get(timeout=30) == value, name
        assert expired.id not in worker.log or "Discarding revoked" in worker.log
        worker.terminate()
    app.close()
    app.backend.result_consumer.stop()
    app.backend.result_consumer.subscribed_to.clear()  # or results that are collected later would unsubscribe
    redis.drop_keyspace(results_url)


def test_a_message_from_a_newer_version_is_given_up_alone(engine, vhost_url):
    with engine.begin() as connection:
        outbox.enqueue(connection, outbox.Event(topic="celery.x", payload={}))
        connection.execute(sa.text("""UPDATE outbox_message SET headers = '{"outbox-delivery": {"unknown": 1}}'"""))
        with unit_of_work(connection):
            configured(OutboxCelery, vhost_url, None).tasks["shop.add"].delay(1, 2)
    assert publish(engine, vhost_url) == [Outcome.UNPUBLISHABLE, Outcome.CONFIRMED]
    assert len(take_all(vhost_url, ["celery"])["celery"]) == 1


def test_a_queue_that_has_gone_is_declared_again_at_the_next_try(engine, vhost_url):
    add = configured(OutboxCelery, vhost_url, None).tasks["shop.add"]
    publisher = RabbitMQPublisher(vhost_url, Routes())
    publisher.connect()
    outcomes = []
    for attempts in range(3):
        with engine.begin() as connection, unit_of_work(connection):
            connection.execute(sa.delete(DEFAULT.message))
            add.delay(1, 2)
            connection.execute(sa.update(DEFAULT.message).values(attempts=max(0, attempts - 1)))
        with engine.connect() as connection:
            rows = claim.unsent(connection, DEFAULT, range(64), limit=100).rows
        outcomes += [verdict.outcome for verdict in publisher.publish(rows, Steer()).verdicts.values()]
        with kombu.Connection(vhost_url) as connection, connection.channel() as channel:
            channel.queue_delete("celery")
    publisher.close()
    assert outcomes == [Outcome.CONFIRMED, Outcome.REJECTED, Outcome.CONFIRMED]
