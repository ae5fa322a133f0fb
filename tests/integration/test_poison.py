"""One bad row among good ones, on a real broker: its neighbours lose nothing, and its own tries keep to its backoff."""

import os
import threading
from datetime import datetime, timedelta
from itertools import pairwise

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
from tests.integration.consuming import until
from tests.integration.test_rabbitmq_publisher import declare, ids_in
from tests.rows import insert, row_of
from tests.servers import rabbitmq as mq

BACKOFF_S = 0.3
LARGEST = 100_000
ROUTES = Routes((Route("missing", exchange="absent", declare=False), Route("#", exchange="", declare=False)))

POISON = {
    "unroutable": ({"topic": "nowhere"}, "Unroutable"),
    "missing exchange": ({"topic": "missing"}, "NotFound"),
    "too large for the broker": ({"topic": "good", "payload": b"x" * (LARGEST + 1)}, "PreconditionFailed"),
    "nacked": ({"topic": "full"}, "Nack"),
    "header too large for a frame": ({"topic": "good", "headers": {"h": "x" * 131_072}}, "CannotSerialize"),
}


@pytest.fixture(scope="module")
def broker():
    """A RabbitMQ of its own, that takes smaller messages than usual."""
    if mq.URL_VARIABLE in os.environ:
        pytest.skip(f"{mq.URL_VARIABLE} names a server whose configuration is its own")
    server = mq.RabbitMQ()
    with (server.folder / "rabbitmq.conf").open("a") as configuration:
        configuration.write(f"max_message_size = {LARGEST}\n")
    with server:
        yield server


@pytest.fixture
def url(broker):
    """A virtual host with a queue `good`, and a queue `full` that is full."""
    url = broker.create_vhost()
    declare(url, "good")
    declare(url, "full", **{"x-max-length": 0, "x-overflow": "reject-publish"})
    return url


def open_relay(engine, url, stop):
    policy = RetryPolicy(backoff=Backoff(first_s=BACKOFF_S, ceiling_s=BACKOFF_S, floor=1))
    transactions = Transactions(engine, DEFAULT, owner="relay", lease_s=30, batch_size=1000, policies=Policies(policy))
    return Relay(transactions, RabbitMQPublisher(url, ROUTES), Stopping(stop, grace_s=5), lease_s=30, poll_interval_s=0.05)


def insert_good(engine, *keys):
    """Messages that can be delivered, all in the partition of the bad one, so that one batch takes them all."""
    return [str(one) for one in insert(engine, *keys, topic="good", partition=0)]


def left(engine):
    with engine.connect() as connection:
        return {str(one) for one in connection.execute(sa.select(DEFAULT.message.c.message_id)).scalars()}


def failed_tries(engine):
    """How often anything has failed, as the totals have it."""
    with engine.connect() as connection:
        return connection.execute(sa.select(sa.func.sum(DEFAULT.partition.c.failed))).scalar_one()


@pytest.mark.parametrize("kind", POISON)
def test_a_bad_row_costs_its_neighbours_nothing_and_is_tried_no_sooner_than_its_backoff_says(kind, engine, url):
    values, error_class = POISON[kind]
    dies = error_class == "CannotSerialize"
    before = insert_good(engine, *[None, "a", "b"] * 20)
    (bad,) = insert(engine, "bad", **({"partition": 0} | values))
    after = insert_good(engine, *["a", "b", None] * 20)
    (follower,) = insert_good(engine, "bad")
    stop = threading.Event()
    relay = open_relay(engine, url, stop)

    relay._turn()  # one batch

    assert left(engine) == {str(bad), follower}, "all neighbours are sent"
    arrived = ids_in(url, "good")
    assert set(arrived) == {*before, *after}
    assert len(arrived) <= 2 * len(set(arrived)), "sent again at most once, to find which one is bad"
    assert failed_tries(engine) == 1
    row = row_of(engine, bad)
    assert (row["state"], row["error_class"]) == (State.DEAD if dies else State.SCHEDULED, error_class)

    thread = threading.Thread(target=relay.run)
    thread.start()
    for tries in range(2, 5):  # meanwhile others come, and go out
        later = insert_good(engine, "a", "b", None)
        until(lambda later=later: not left(engine) & set(later))
        assert set(ids_in(url, "good")) == set(later)
        until(lambda tries=tries: dies or len(row_of(engine, bad)["failures"]) >= tries)
    stop.set()
    thread.join()

    row = row_of(engine, bad)
    failures = row["failures"]
    assert failed_tries(engine) == len(failures), "nobody else has failed"
    assert row["attempts"] == (0 if error_class == "Nack" else len(failures))
    times = [datetime.fromisoformat(failure["at"]) for failure in failures]
    assert all(later - earlier > timedelta(seconds=BACKOFF_S * 0.95) for earlier, later in pairwise(times))
    assert len(failures) == 1 if dies else len(failures) >= 4
    assert tuple(row_of(engine, follower)[name] for name in ("state", "attempts")) == (State.BLOCKED, 0)
