"""A message that breaks the whole connection, on a real broker: found among its neighbours, which lose nothing by it."""

import json
import threading
from contextlib import contextmanager

import pytest
import sqlalchemy as sa

from outbox.backoff import Backoff
from outbox.policies import Policies
from outbox.publishers.rabbitmq import RabbitMQPublisher
from outbox.relay import Relay, Transactions
from outbox.relay.stopping import Stopping
from outbox.routes import Route, Routes
from outbox.states import RetryPolicy, State
from outbox.tables import DEFAULT
from tests.faults.proxy import Proxy
from tests.integration.consuming import until
from tests.integration.test_rabbitmq_publisher import arrived, declare
from tests.rows import insert, row_of

MARK = b"this breaks the connection"
ROUTES = Routes((Route("#", exchange="", declare=False),))
ATTEMPTS = 3


@contextmanager
def running(engine, url, owner="relay"):
    """A relay in a thread; a message of its own fault is tried again soon, and dies at the third failure."""
    stop = threading.Event()
    policy = RetryPolicy(max_attempts=ATTEMPTS, backoff=Backoff(first_s=0.05, ceiling_s=0.05))
    transactions = Transactions(engine, DEFAULT, owner=owner, lease_s=30, batch_size=1000, policies=Policies(policy))
    relay = Relay(transactions, RabbitMQPublisher(url, ROUTES), Stopping(stop, grace_s=5), lease_s=30, poll_interval_s=0.05)
    thread = threading.Thread(target=relay.run)
    thread.start()
    try:
        yield relay
    finally:
        stop.set()
        thread.join()


def number_of(engine, *keys, first=0, **values):
    """Insert one message for each key, numbered in their order."""
    return [
        insert(engine, key, topic="q", payload=json.dumps({"number": first + place}).encode(), **values)[0]
        for place, key in enumerate(keys)
    ]


def left(engine):
    with engine.connect() as connection:
        return set(connection.execute(sa.select(DEFAULT.message.c.message_id)).scalars())


def spent(engine):
    """How many attempts were spent, as the totals have it."""
    with engine.connect() as connection:
        return connection.execute(sa.select(sa.func.sum(DEFAULT.partition.c.failed))).scalar_one()


def judge(messages, message_ids):
    """All have arrived, and the first copies are in the order of their keys."""
    assert {message.properties["message_id"] for message in messages} == {str(one) for one in message_ids}
    by_key: dict[str, list[int]] = {}
    for message in messages:
        by_key.setdefault(message.headers.get("outbox-key"), []).append(json.loads(message.body)["number"])
    by_key.pop(None, None)
    for numbers in by_key.values():
        first = list(dict.fromkeys(numbers))
        assert first == sorted(first)


@pytest.mark.parametrize(
    "size", [pytest.param(0, id="small"), pytest.param(5_000_000, id="larger than a socket's buffers", marks=pytest.mark.matrix)]
)
def test_the_poison_dies_with_its_reason_after_its_attempts_and_its_neighbours_are_delivered_promptly(size, engine, vhost_url):
    declare(vhost_url, "q")
    before = number_of(engine, *["a", "b", None, "c"] * 25)
    (poison,) = insert(engine, "p", topic="q", payload=b"x" * size + MARK)
    after = number_of(engine, *["a", "b", None, "p"] * 25, first=100)
    behind = set(after[3::4])
    neighbours = {*before, *after} - behind
    with Proxy(vhost_url, breaks_at=MARK) as proxy, running(engine, proxy.url):
        until(lambda: not left(engine) & neighbours)
        assert row_of(engine, poison)["state"] != State.DEAD, "they did not wait for its end"
        while row_of(engine, poison)["state"] != State.DEAD:
            later = number_of(engine, "a", None, first=1000)
            neighbours |= set(later)
            until(lambda later=later: not left(engine) & set(later))
    assert proxy.connections <= 3 + ATTEMPTS + 2, "the first loss, three to convict it, and one for each attempt from then on"

    row = row_of(engine, poison)
    assert (row["attempts"], row["error_class"]) == (ATTEMPTS, "ConnectionLost")
    assert row["last_error"] == "broker: connection lost each time this message was sent alone"
    assert left(engine) == {poison, *behind}
    assert all(row_of(engine, one)["state"] == State.BLOCKED for one in behind)
    assert spent(engine) == ATTEMPTS, "nobody else has failed"
    messages = arrived(vhost_url, "q")
    assert {message.properties["message_id"] for message in messages} == {str(one) for one in neighbours}
    assert len(messages) <= 2 * len(neighbours)
    judge([message for message in messages if json.loads(message.body)["number"] < 1000], {*before, *after} - behind)


@pytest.mark.matrix
def test_two_relays_come_to_the_same_end(engine, vhost_url):
    declare(vhost_url, "q")
    neighbours = number_of(engine, *["a", "b", None, "c"] * 25)
    poison = insert(engine, "p", "r", None, topic="q", payload=MARK)
    with Proxy(vhost_url, breaks_at=MARK) as proxy, running(engine, proxy.url, "one"), running(engine, proxy.url, "two"):
        until(lambda: all(row_of(engine, one)["state"] == State.DEAD for one in poison))
        until(lambda: left(engine) == set(poison))
    assert spent(engine) == ATTEMPTS * len(poison)
    judge(arrived(vhost_url, "q"), neighbours)


@pytest.mark.matrix
def test_connections_that_are_cut_at_random_spend_no_attempt(engine, vhost_url):
    declare(vhost_url, "q")
    sent = []
    with Proxy(vhost_url) as proxy, running(engine, proxy.url):
        for turn in range(20):
            sent += number_of(engine, *(["a", "b", None] * 30 if turn % 4 else ["a"]), first=100 * turn)
            proxy.cut()
        until(lambda: not left(engine))
    assert spent(engine) == 0
    judge(arrived(vhost_url, "q"), sent)


@pytest.mark.timeout(240)
@pytest.mark.matrix
@pytest.mark.parametrize("end", ["restart", "kill"])
def test_a_broker_that_restarts_spends_no_attempt_and_is_made_up_for_at_once(end, engine, own_rabbitmq):
    url = own_rabbitmq.create_vhost()
    declare(url, "q")  # classic, see the test of the publisher
    sent = number_of(engine, *["a", "b", None, "c"] * 500)
    with running(engine, url):
        until(lambda: 0 < len(left(engine)) < len(sent))
        own_rabbitmq.stop() if end == "restart" else own_rabbitmq.kill()
        own_rabbitmq.start()
        until(lambda: not left(engine))
    assert spent(engine) == 0
    judge(arrived(url, "q"), sent)
    own_rabbitmq.drop_vhost(url)
