"""The publisher on a real RabbitMQ; a plain client of py-amqp judges what arrived."""

import socket
import threading
import time
from contextlib import contextmanager, suppress
from urllib.parse import urlsplit, urlunsplit

import amqp
import kombu
import pytest

from outbox.errors import BrokerRefused, BrokerUnavailable
from outbox.publishers.confirms import BURST_MESSAGES
from outbox.publishers.rabbitmq import RabbitMQPublisher
from outbox.routes import Route, Routes
from outbox.states import Outcome
from tests.integration.consuming import until
from tests.rows import outgoing
from tests.servers.proc import free_port

TO_QUEUES = Routes((Route("#", exchange="", declare=False),))
"""Each topic goes to the queue of its name, which the test declares."""


class Steer:
    """A control that lets everything go, unless told otherwise; `on_progress` is called with each answer."""

    def __init__(self, *, sends=10**9, on_progress=lambda: None):
        self.sends, self.on_progress = sends, on_progress
        self.waits = True

    def may_send(self):
        self.sends -= 1
        return self.sends >= 0

    def may_wait(self):
        return self.waits

    def progress(self):
        self.on_progress()


@contextmanager
def client(url):
    parts = urlsplit(url)
    vhost = kombu.Connection(url).virtual_host
    with amqp.Connection(f"{parts.hostname}:{parts.port}", virtual_host=vhost, connect_timeout=30) as connection:
        yield connection.channel()


def declare(url, *queues, exchange=None, **arguments):
    with client(url) as channel:
        if exchange:
            channel.exchange_declare(exchange, "topic", durable=True, auto_delete=False)
        for queue in queues:
            channel.queue_declare(queue, durable=True, auto_delete=False, arguments={**arguments})
            if exchange:
                channel.queue_bind(queue, exchange, "#")


def arrived(url, queue):
    """Take everything out of a queue."""
    with client(url) as channel:
        return list(iter(lambda: channel.basic_get(queue, no_ack=True), None))


def ids_in(url, queue):
    return [message.properties["message_id"] for message in arrived(url, queue)]


def ids_of(rows):
    return [str(row.message_id) for row in rows]


@pytest.fixture
def open_publisher():
    """Make connected publishers, closed at the end."""
    made = []

    def open_publisher(url, routes=TO_QUEUES, **options):
        publisher = RabbitMQPublisher(url, routes, **options)
        made.append(publisher)
        publisher.connect()
        return publisher

    yield open_publisher
    for publisher in made:
        publisher.close()


def publish(publisher, rows, control=None):
    """Publish, and return the outcomes by row id."""
    published = publisher.publish(rows, control or Steer())
    assert published.lost is None
    assert set(published.verdicts) == {row.id for row in rows}
    return {number: verdict.outcome for number, verdict in published.verdicts.items()}


def all_confirmed(rows):
    return {row.id: Outcome.CONFIRMED for row in rows}


# What arrives


def test_a_confirmed_message_arrives_exactly_as_it_was(vhost_url, open_publisher):
    declare(vhost_url, "orders", exchange="outbox")
    row = outgoing(
        key="o-1", payload=b"\x00\xff\x01", content_type="application/x-thing", type="Placed", topic="orders.placed",
        headers={"text": "č", "yes": True, "no": None, "big": 2**62, "negative": -5},
    )  # fmt: skip
    publisher = open_publisher(vhost_url, Routes())
    assert publish(publisher, [row]) == all_confirmed([row])

    (message,) = arrived(vhost_url, "orders")
    assert message.delivery_info["exchange"] == "outbox"
    assert message.delivery_info["routing_key"] == "orders.placed"
    assert message.body == b"\x00\xff\x01"
    assert message.headers == row.headers | {"outbox-topic": "orders.placed", "outbox-key": "o-1"}
    assert {name: value for name, value in message.properties.items() if name != "application_headers"} == {
        "message_id": str(row.message_id),
        "type": "Placed",
        "content_type": "application/x-thing",
        "content_encoding": "binary",
        "delivery_mode": 2,
        "timestamp": int(row.created_at.timestamp()),
    }


@pytest.mark.parametrize("payload", [b"", b"{}", b"x" * 131_071, b"x" * 131_072, b"x" * 3_000_000])
def test_a_body_of_any_size_arrives_whole(vhost_url, open_publisher, payload):
    declare(vhost_url, "q")
    rows = [outgoing(1, topic="q", payload=payload), outgoing(2, topic="q")]
    assert publish(open_publisher(vhost_url), rows) == all_confirmed(rows)

    assert [message.body.encode() for message in arrived(vhost_url, "q")] == [payload, rows[1].payload]


def test_thousands_are_confirmed_once_each_in_order(vhost_url, open_publisher):
    declare(vhost_url, "q")
    rows = [outgoing(number, topic="q") for number in range(1, 3001)]
    assert publish(open_publisher(vhost_url), rows) == all_confirmed(rows)

    assert ids_in(vhost_url, "q") == ids_of(rows)


def test_one_connection_serves_many_batches(vhost_url, open_publisher):
    declare(vhost_url, "q")
    publisher = open_publisher(vhost_url)
    rows = [outgoing(number, topic="q") for number in range(1, 61)]
    for start in range(0, 60, 20):
        publisher.connect()
        publisher.tick()
        assert publish(publisher, rows[start : start + 20]) == all_confirmed(rows[start : start + 20])

    assert ids_in(vhost_url, "q") == ids_of(rows)


def test_the_routes_exchanges_and_queues_are_declared_with_every_binding(vhost_url, open_publisher):
    routes = Routes(
        (
            Route("orders.placed", exchange="shop", queues=["orders"]),
            Route("orders.*", exchange="shop", queues=["orders", "audit"]),
            Route("bills.#", exchange="bills", exchange_type="direct", routing_key="{type}", declare=True),
        )
    )
    publisher = open_publisher(vhost_url, routes)
    rows = [outgoing(1, topic="orders.placed"), outgoing(2, topic="orders.gone")]
    assert publish(publisher, rows) == all_confirmed(rows)

    assert ids_in(vhost_url, "orders") == ids_of(rows)
    assert ids_in(vhost_url, "audit") == ids_of(rows)
    with client(vhost_url) as channel:
        channel.exchange_declare("bills", "direct", durable=True, auto_delete=False)  # raises if it is of another kind


def test_queues_that_exist_as_another_kind_are_used_as_they_are(vhost_url, open_publisher):
    declare(vhost_url, "orders")  # classic
    publisher = open_publisher(vhost_url, Routes((Route("#", exchange="shop", queues=["orders"]),)))
    row = outgoing()
    assert publish(publisher, [row]) == all_confirmed([row])

    assert ids_in(vhost_url, "orders") == ids_of([row])


# What the broker will not take


def test_an_unroutable_message_is_rejected_with_the_reason_and_its_neighbours_are_confirmed(vhost_url, open_publisher):
    declare(vhost_url, "q")
    rows = [outgoing(number, topic="nowhere" if number % 10 == 0 else "q") for number in range(1, 101)]
    published = open_publisher(vhost_url).publish(rows, Steer())

    rejected = {number for number, verdict in published.verdicts.items() if verdict.outcome is Outcome.REJECTED}
    assert rejected == set(range(10, 101, 10))
    assert published.lost is None
    assert published.verdicts[10].reason == "broker: unroutable (NO_ROUTE): no queue is bound to exchange '' for 'nowhere'"
    assert ids_in(vhost_url, "q") == ids_of(row for row in rows if row.topic == "q")


def test_a_message_that_was_unroutable_is_confirmed_when_a_queue_is_there(vhost_url, open_publisher):
    publisher, row = open_publisher(vhost_url), outgoing(topic="q")
    assert publish(publisher, [row]) == {1: Outcome.REJECTED}
    declare(vhost_url, "q")

    assert publish(publisher, [row]) == {1: Outcome.CONFIRMED}


def test_a_full_queue_refuses_and_the_rest_of_the_key_is_held(vhost_url, open_publisher):
    declare(vhost_url, "full", **{"x-max-length": 1, "x-overflow": "reject-publish"})
    declare(vhost_url, "q")
    publisher = open_publisher(vhost_url)
    assert publish(publisher, [outgoing(1, topic="full")]) == {1: Outcome.CONFIRMED}
    rows = [
        outgoing(2, topic="full"),
        outgoing(3, "a", topic="full"),
        outgoing(4, "a", topic="q"),
        outgoing(5, "b", topic="q"),
        outgoing(6, topic="q"),
    ]
    published = publisher.publish(rows, Steer())

    outcomes = {number: verdict.outcome for number, verdict in published.verdicts.items()}
    assert outcomes == {
        2: Outcome.REFUSED,
        3: Outcome.REFUSED,
        4: Outcome.HELD,
        5: Outcome.CONFIRMED,
        6: Outcome.CONFIRMED,
    }
    assert published.verdicts[2].reason == "broker: nack; a queue is full or has failed"
    assert ids_in(vhost_url, "q") == ids_of(rows[3:])


def test_a_missing_exchange_rejects_its_messages_alone_and_all_others_are_confirmed_once(vhost_url, open_publisher):
    routes = Routes((Route("bad", exchange="absent", declare=False), Route("#", exchange="", declare=False)))
    declare(vhost_url, "q")
    rows = [outgoing(number, topic="bad" if number in (7, 8, 200) else "q") for number in range(1, 301)]
    publisher = open_publisher(vhost_url, routes)
    answers = []
    published = publisher.publish(rows, Steer(on_progress=lambda: answers.append(1)))

    rejected = {number for number, verdict in published.verdicts.items() if verdict.outcome is Outcome.REJECTED}
    assert rejected == {7, 8, 200}
    assert "404 NOT_FOUND - no exchange 'absent' in vhost" in published.verdicts[7].reason
    assert set(published.verdicts) == {row.id for row in rows}
    assert published.lost is None
    # What was in flight when the channel was closed is sent again, so it may be there twice; nothing is missing.
    assert set(ids_in(vhost_url, "q")) == set(ids_of(row for row in rows if row.topic == "q"))
    again = outgoing(999, topic="q")
    assert publish(publisher, [again]) == all_confirmed([again])


def test_the_order_of_a_key_survives_a_channel_that_is_closed(vhost_url, open_publisher):
    routes = Routes((Route("bad", exchange="absent", declare=False), Route("#", exchange="", declare=False)))
    declare(vhost_url, "q")
    rows = [outgoing(number, f"key-{number % 7}", topic="q") for number in range(1, 141)]
    rows[50] = outgoing(51, "key-2", topic="bad")
    outcomes = publish(open_publisher(vhost_url, routes), rows)

    held = {row.id for row in rows if row.key == "key-2" and row.id > 51}
    assert {number for number, outcome in outcomes.items() if outcome is Outcome.HELD} == held
    assert {number for number, outcome in outcomes.items() if outcome is Outcome.REJECTED} == {51}
    by_key: dict[str, list[str]] = {}
    for message in arrived(vhost_url, "q"):
        by_key.setdefault(message.headers["outbox-key"], []).append(message.properties["message_id"])
    for key, ids in by_key.items():
        first_seen = list(dict.fromkeys(ids))
        assert first_seen == ids_of(row for row in rows if row.key == key and row.id not in held | {51})


def test_a_long_search_for_culprits_counts_as_progress(vhost_url, open_publisher):
    """The broker answers by closing the channel: the relay must not lose its lease over it."""
    routes = Routes((Route("#", exchange="absent", declare=False),))
    answers = []
    rows = [outgoing(number) for number in range(1, 11)]
    outcomes = publish(open_publisher(vhost_url, routes), rows, Steer(on_progress=lambda: answers.append(1)))

    assert set(outcomes.values()) == {Outcome.REJECTED}
    assert len(answers) >= 10


@pytest.mark.parametrize(
    ("values", "problem"),
    [
        ({"headers": {"h": "x" * 200_000}}, "headers take 200"),
        ({"headers": {"h": 2**63}}, "header or property"),
        ({"type": "t" * 256}, "header or property"),
        ({"topic": "q" * 200, "key": "k" * 200}, "routing key"),
        ({"topic": "q", "key": "é" * 127}, "routing key"),
    ],
)
def test_what_the_wire_cannot_carry_is_found_without_the_broker(vhost_url, open_publisher, values, problem):
    routes = Routes(
        (Route("ok", exchange="", declare=False), Route("#", exchange="", routing_key="{topic}.{key}", declare=False))
    )
    declare(vhost_url, "ok")
    rows = [outgoing(1, topic="ok"), outgoing(**{"number": 2, "topic": "q", "key": "k"} | values), outgoing(3, topic="ok")]
    publisher = open_publisher(vhost_url, routes)
    connection = publisher._broker._amqp
    published = publisher.publish(rows, Steer())

    assert {number: verdict.outcome for number, verdict in published.verdicts.items()} == {
        1: Outcome.CONFIRMED,
        2: Outcome.UNPUBLISHABLE,
        3: Outcome.CONFIRMED,
    }
    assert problem in published.verdicts[2].reason
    assert publisher._broker._amqp is connection, "the connection was kept"


# What is in flight


def test_two_messages_of_a_key_are_never_in_flight_together_and_arrive_in_order(vhost_url, open_publisher):
    declare(vhost_url, "q")
    publisher, in_flight = open_publisher(vhost_url, window=50), []
    rows = [outgoing(number, f"key-{number % 20}", topic="q") for number in range(1, 1001)]

    def note():
        in_flight.append([row.key for row in publisher._confirms._unconfirmed.values()])

    assert publish(publisher, rows, Steer(on_progress=note)) == all_confirmed(rows)

    assert all(len(keys) == len(set(keys)) for keys in in_flight)
    assert max(map(len, in_flight)) > 1, "pipelined"
    messages = arrived(vhost_url, "q")
    assert len(messages) == 1000
    for number in range(20):
        key = f"key-{number}"
        its = [message.properties["message_id"] for message in messages if message.headers["outbox-key"] == key]
        assert its == ids_of(row for row in rows if row.key == key)


def test_no_more_are_in_flight_than_the_window_allows(vhost_url, open_publisher):
    declare(vhost_url, "q")
    publisher, seen = open_publisher(vhost_url, window=7), []
    rows = [outgoing(number, topic="q") for number in range(1, 301)]
    publish(publisher, rows, Steer(on_progress=lambda: seen.append(len(publisher._confirms._unconfirmed))))

    assert 1 < max(seen) <= 7


def test_large_messages_are_limited_by_their_bytes(vhost_url, open_publisher):
    declare(vhost_url, "q")
    publisher, seen = open_publisher(vhost_url), []
    rows = [outgoing(number, topic="q", payload=b"x" * 400_000) for number in range(1, 21)]
    publish(publisher, rows, Steer(on_progress=lambda: seen.append(len(publisher._confirms._unconfirmed))))

    assert max(seen) <= 3


def test_large_headers_count_as_bytes_in_flight_too(vhost_url, open_publisher):
    declare(vhost_url, "q")
    publisher, seen = open_publisher(vhost_url), []
    rows = [outgoing(number, topic="q", headers={"h": "x" * 100_000}) for number in range(1, 61)]
    publish(publisher, rows, Steer(on_progress=lambda: seen.append(len(publisher._confirms._unconfirmed))))

    assert max(seen) <= 10


@pytest.mark.parametrize("sends", [2, 3])
def test_what_may_not_be_sent_any_more_is_unsent_and_what_was_sent_is_waited_for(vhost_url, open_publisher, sends):
    """It is asked before a burst is gathered, and again before it is put on the wire."""
    declare(vhost_url, "q")
    rows = [outgoing(number, topic="q") for number in range(1, 3 * BURST_MESSAGES)]
    outcomes = publish(open_publisher(vhost_url), rows, Steer(sends=sends))

    assert [number for number, outcome in outcomes.items() if outcome is Outcome.CONFIRMED] == list(range(1, BURST_MESSAGES + 1))
    assert {outcomes[row.id] for row in rows[BURST_MESSAGES:]} == {Outcome.UNSENT}
    assert ids_in(vhost_url, "q") == ids_of(rows[:BURST_MESSAGES])


def test_what_was_recalled_goes_out_with_the_next_batch_and_its_confirms_are_not_mixed_up(vhost_url, open_publisher):
    declare(vhost_url, "q")
    publisher = open_publisher(vhost_url)
    rows = [outgoing(number, topic="q") for number in range(1, 2 * BURST_MESSAGES)]
    outcomes = publish(publisher, rows, Steer(sends=3))
    again = [row for row in rows if outcomes[row.id] is Outcome.UNSENT]
    publisher.connect()

    assert set(publish(publisher, [outgoing(100, topic="nowhere"), *again]).values()) == {Outcome.REJECTED, Outcome.CONFIRMED}
    assert sorted(ids_in(vhost_url, "q")) == sorted(ids_of(rows))


def test_each_way_to_fail_has_a_class(vhost_url, open_publisher):
    declare(vhost_url, "fine")
    declare(vhost_url, "full", **{"x-max-length": 1, "x-overflow": "reject-publish"})
    routes = Routes((Route("absent", exchange="absent", declare=False), *TO_QUEUES.routes))
    publisher = open_publisher(vhost_url, routes)
    assert publish(publisher, [outgoing(0, topic="full")]) == {0: Outcome.CONFIRMED}
    topics = ["fine", "nowhere", "full", "too.large", "absent"]
    headers = {"too.large": {"h": "x" * 200_000}}
    rows = [outgoing(number, topic=topic, headers=headers.get(topic, {})) for number, topic in enumerate(topics, 1)]
    verdicts = publisher.publish(rows, Steer()).verdicts

    assert [(row.topic, verdicts[row.id].outcome, verdicts[row.id].error_class) for row in rows] == [
        ("fine", Outcome.CONFIRMED, None),
        ("nowhere", Outcome.REJECTED, "Unroutable"),
        ("full", Outcome.REFUSED, "Nack"),
        ("too.large", Outcome.UNPUBLISHABLE, "CannotSerialize"),
        ("absent", Outcome.REJECTED, "NotFound"),
    ]


# Addresses that lead nowhere


def returned(publisher):
    """The ids that the broker returned, each time, as they come over the wire."""
    seen = []
    publisher._confirms._channel.events["basic_return"].add(
        lambda _error, _exchange, _key, message: seen.append(message.properties["message_id"])
    )
    return seen


def test_of_many_messages_for_an_address_that_leads_nowhere_one_tells_for_all(vhost_url, open_publisher):
    declare(vhost_url, "q")
    publisher = open_publisher(vhost_url)
    first = [outgoing(number, topic="nowhere") for number in range(1, 4)]
    assert set(publish(publisher, first).values()) == {Outcome.REJECTED}
    seen = returned(publisher)
    second = [outgoing(number, key=f"k{number % 3}" if number % 2 else None, topic="nowhere") for number in range(11, 31)]
    good = [outgoing(number, topic="q") for number in range(41, 61)]
    published = publisher.publish([*second, *good], Steer())

    assert seen == ids_of(second[:1])
    verdicts = [published.verdicts[row.id] for row in second]
    assert {verdict.outcome for verdict in verdicts} == {Outcome.REJECTED, Outcome.HELD}
    assert all("no queue is bound" in verdict.reason for verdict in verdicts if verdict.outcome is Outcome.REJECTED)
    assert ids_in(vhost_url, "q") == ids_of(good)


def test_when_the_first_gets_through_all_follow_it(vhost_url, open_publisher):
    publisher = open_publisher(vhost_url)
    rows = [outgoing(number, key=f"k{number % 5}", topic="late") for number in range(1, 41)]
    assert Outcome.CONFIRMED not in publish(publisher, rows).values()
    declare(vhost_url, "late")

    assert set(publish(publisher, rows).values()) == {Outcome.CONFIRMED}
    arrived_ids = ids_in(vhost_url, "late")
    assert sorted(arrived_ids) == sorted(ids_of(rows))
    for key in range(5):
        own = ids_of(row for row in rows if row.key == f"k{key}")
        assert [each for each in arrived_ids if each in own] == own


def test_where_headers_decide_each_message_is_tried(vhost_url, open_publisher):
    routes = Routes((Route("#", exchange="by-headers", exchange_type="headers"),))
    publisher = open_publisher(vhost_url, routes)
    lost = [outgoing(number, topic="t", headers={"to": "nobody"}) for number in range(1, 4)]
    publish(publisher, lost)
    with client(vhost_url) as channel:
        channel.queue_declare("q", durable=True, auto_delete=False)
        channel.queue_bind("q", "by-headers", arguments={"x-match": "all", "to": "somebody"})
    found = [outgoing(number, topic="t", headers={"to": "somebody"}) for number in range(11, 14)]

    outcomes = publish(publisher, [*lost, *found])
    assert [outcomes[row.id] for row in found] == [Outcome.CONFIRMED] * 3
    assert ids_in(vhost_url, "q") == ids_of(found)


def test_what_is_not_waited_for_is_unknown_and_its_confirm_is_not_taken_for_another(vhost_url, open_publisher):
    declare(vhost_url, "q")
    publisher, control = open_publisher(vhost_url), Steer()
    control.waits = False
    rows = [outgoing(number, topic="q") for number in range(1, 6)]
    published = publisher.publish(rows, control)
    assert Outcome.UNKNOWN in {verdict.outcome for verdict in published.verdicts.values()}

    publisher.connect()
    later = [outgoing(6, topic="nowhere"), outgoing(7, topic="q")]
    assert publish(publisher, later) == {6: Outcome.REJECTED, 7: Outcome.CONFIRMED}


# Outages


def closing_connections(server):
    """Close all connections at the first answer, as an administrator would."""
    done = []

    def close():
        if not done:
            done.append(server.ctl("close_all_connections", "--global", "maintenance"))

    return Steer(on_progress=close)


def test_a_connection_that_the_broker_closes_is_lost_and_the_next_one_works(own_rabbitmq, open_publisher):
    url = own_rabbitmq.create_vhost()
    declare(url, "q")
    publisher = open_publisher(url, window=10)
    rows = [outgoing(number, topic="q") for number in range(1, 501)]
    published = publisher.publish(rows, closing_connections(own_rabbitmq))

    assert isinstance(published.lost, BrokerUnavailable)
    assert "320 CONNECTION_FORCED - maintenance" in str(published.lost)
    outcomes = {number: verdict.outcome for number, verdict in published.verdicts.items()}
    assert set(outcomes) == {row.id for row in rows}
    assert set(outcomes.values()) <= {Outcome.CONFIRMED, Outcome.UNKNOWN, Outcome.UNSENT}
    assert list(outcomes.values()).count(Outcome.UNKNOWN) <= 10
    assert outcomes[500] is Outcome.UNSENT

    publisher.connect()
    rest = [row for row in rows if outcomes[row.id] is not Outcome.CONFIRMED]
    assert publish(publisher, rest) == all_confirmed(rest)
    assert list(dict.fromkeys(ids_in(url, "q"))) == ids_of(rows)
    own_rabbitmq.drop_vhost(url)


def test_an_idle_connection_that_the_broker_closes_is_noticed(own_rabbitmq, open_publisher):
    publisher = open_publisher(own_rabbitmq.url)
    own_rabbitmq.ctl("close_all_connections", "maintenance")

    def noticed():
        try:
            publisher.tick()
        except BrokerUnavailable as error:
            return "maintenance" in str(error)

    until(noticed)
    publisher.connect()
    publisher.tick()


def test_a_broker_that_is_killed_is_lost_and_comes_back(own_rabbitmq, open_publisher):
    url = own_rabbitmq.create_vhost()
    declare(url, "q")  # classic: a quorum queue that is killed moments after it was declared may never find a leader again
    publisher, killed = open_publisher(url, window=10), []

    def kill():
        if not killed:
            killed.append(own_rabbitmq.kill())

    rows = [outgoing(number, topic="q") for number in range(1, 501)]
    published = publisher.publish(rows, Steer(on_progress=kill))
    assert isinstance(published.lost, BrokerUnavailable)
    with pytest.raises(BrokerUnavailable):
        publisher.connect()

    own_rabbitmq.start()
    until(lambda: connects(publisher))
    rest = [row for row in rows if published.verdicts[row.id].outcome is not Outcome.CONFIRMED]
    assert publish(publisher, rest) == all_confirmed(rest)
    assert set(ids_in(url, "q")) == set(ids_of(rows))
    own_rabbitmq.drop_vhost(url)


def connects(publisher):
    try:
        publisher.connect()
    except BrokerUnavailable:
        return False
    return True


class Proxy(threading.Thread):
    """Stands between a client and the broker, and can stop passing on what the broker says."""

    def __init__(self, url):
        super().__init__(daemon=True)
        self.target = (urlsplit(url).hostname, urlsplit(url).port)
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.url = with_url(url, port=self.listener.getsockname()[1])
        self.mute, self.sockets = threading.Event(), [self.listener]

    def run(self):
        near, _ = self.listener.accept()
        far = socket.create_connection(self.target)
        self.sockets += [near, far]
        threading.Thread(target=self.pass_on, args=(near, far, threading.Event()), daemon=True).start()
        self.pass_on(far, near, self.mute)

    def pass_on(self, source, target, mute):
        with suppress(OSError):
            while data := source.recv(65536):
                if not mute.is_set():
                    target.sendall(data)

    def close(self):
        for each in self.sockets:
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            each.close()
        self.join()


def test_a_broker_that_falls_silent_is_lost_after_the_confirm_timeout(vhost_url, open_publisher):
    declare(vhost_url, "q")
    proxy = Proxy(vhost_url)
    proxy.start()
    publisher = open_publisher(proxy.url, confirm_timeout_s=1, window=10)
    rows = [outgoing(number, topic="q") for number in range(1, 101)]
    began = time.monotonic()
    published = publisher.publish(rows, Steer(on_progress=proxy.mute.set))
    proxy.close()

    assert 1 <= time.monotonic() - began < 3
    assert str(published.lost) == "broker: no confirm for 1 s"
    outcomes = [verdict.outcome for verdict in published.verdicts.values()]
    assert 1 <= outcomes.count(Outcome.UNKNOWN) <= 10
    assert Outcome.UNSENT in outcomes


def with_url(url, **parts):
    split = urlsplit(url)
    user = parts.get("user", split.username)
    netloc = f"{user}:{parts.get('password', split.password)}@{split.hostname}:{parts.get('port', split.port)}"
    return urlunsplit(split._replace(netloc=netloc, path=parts.get("path", split.path)))


def refusal(url, routes=TO_QUEUES):
    publisher = RabbitMQPublisher(url, routes)
    with pytest.raises(BrokerRefused) as caught:
        publisher.connect()
    publisher.close()
    return str(caught.value)


def test_a_wrong_password_is_refused_and_not_shown(vhost_url):
    text = refusal(with_url(vhost_url, password="geheim"))

    assert text.startswith("broker: 403 ")
    assert "ACCESS_REFUSED" in text
    assert "geheim" not in text


def test_a_missing_virtual_host_is_refused_by_name(vhost_url):
    text = refusal(with_url(vhost_url, path="/absent"))

    assert text.startswith("broker: 530 NOT_ALLOWED - ")
    assert "absent" in text


def test_an_exchange_of_another_type_is_refused_by_name(vhost_url):
    declare(vhost_url, exchange="shop")
    text = refusal(vhost_url, Routes((Route("#", exchange="shop", exchange_type="fanout"),)))

    assert text.startswith("broker: 406 PRECONDITION_FAILED - ")
    assert "type" in text
    assert "'shop'" in text


def test_nobody_listening_is_unavailable_at_once(vhost_url):
    publisher = RabbitMQPublisher(with_url(vhost_url, port=free_port()), TO_QUEUES)
    began = time.monotonic()
    with pytest.raises(BrokerUnavailable, match="Connection refused") as caught:
        publisher.connect()

    assert time.monotonic() - began < 2
    assert not isinstance(caught.value, BrokerRefused)
    publisher.close()
    publisher.close()


def test_publishing_without_a_connection_is_lost_and_all_unsent():
    publisher = RabbitMQPublisher("amqp://127.0.0.1:1//", TO_QUEUES)
    published = publisher.publish([outgoing(1), outgoing(2, "a")], Steer())

    assert isinstance(published.lost, BrokerUnavailable)
    assert {verdict.outcome for verdict in published.verdicts.values()} == {Outcome.UNSENT}
    publisher.tick()


def test_of_several_brokers_the_next_is_tried(vhost_url):
    publisher = RabbitMQPublisher(f"{with_url(vhost_url, port=free_port())};{vhost_url}", TO_QUEUES)
    until(lambda: connects(publisher))
    declare(vhost_url, "q")
    row = outgoing(topic="q")

    assert publish(publisher, [row]) == all_confirmed([row])
    publisher.close()


# A broker under pressure


class Blocked(Steer):
    """Notes when the publisher, blocked, has come to rest."""

    def __init__(self, publisher):
        super().__init__()
        self.publisher = publisher
        self.rests = 0

    def progress(self):
        if self.publisher.blocked:
            self.rests += 1


def test_under_a_memory_alarm_nothing_more_is_sent_and_after_it_all_are_confirmed_once(own_rabbitmq, open_publisher):
    url = own_rabbitmq.create_vhost()
    declare(url, "q")
    publisher = open_publisher(url, window=20, confirm_timeout_s=2)
    rows = [outgoing(number, topic="q") for number in range(1, 201)]
    control, published = Blocked(publisher), []
    try:
        own_rabbitmq.ctl("set_vm_memory_high_watermark", "0.00001")
        thread = threading.Thread(target=lambda: published.append(publisher.publish(rows, control)))
        thread.start()
        until(lambda: control.rests >= 2)
        assert publisher.blocked
        sent = publisher._confirms._tag
        until(lambda: control.rests >= 15)  # three seconds, longer than the confirm timeout
        assert publisher._confirms._tag == sent <= 20
        assert thread.is_alive()
    finally:
        own_rabbitmq.ctl("set_vm_memory_high_watermark", "0.4")
    thread.join(30)

    assert not publisher.blocked
    assert published[0].lost is None
    assert {number: verdict.outcome for number, verdict in published[0].verdicts.items()} == all_confirmed(rows)
    assert ids_in(url, "q") == ids_of(rows)
    own_rabbitmq.drop_vhost(url)


def test_a_stop_under_a_memory_alarm_ends_the_publish(own_rabbitmq, open_publisher):
    url = own_rabbitmq.create_vhost()
    declare(url, "q")
    publisher = open_publisher(url)
    rows = [outgoing(number, topic="q") for number in range(1, 2 * publisher.window)]
    control, published = Blocked(publisher), []
    try:
        own_rabbitmq.ctl("set_vm_memory_high_watermark", "0.00001")
        thread = threading.Thread(target=lambda: published.append(publisher.publish(rows, control)))
        thread.start()
        until(lambda: control.rests >= 2)
        control.sends = 0
        control.waits = False
        thread.join(10)
        assert not thread.is_alive()
    finally:
        own_rabbitmq.ctl("set_vm_memory_high_watermark", "0.4")

    outcomes = {verdict.outcome for verdict in published[0].verdicts.values()}
    assert outcomes <= {Outcome.UNKNOWN, Outcome.UNSENT, Outcome.CONFIRMED}
    assert Outcome.UNSENT in outcomes
    own_rabbitmq.drop_vhost(url)


# Heartbeats


@pytest.fixture
def quick_heartbeat(monkeypatch):
    """One second: the broker gives a silent client up after about two."""
    monkeypatch.setattr("outbox.broker.dial.HEARTBEAT_S", 1)
    monkeypatch.setattr("outbox.publishers.connection.HEARTBEAT_S", 1)


def tick_for(publisher, seconds, every):
    pause, end = threading.Event(), time.monotonic() + seconds
    while time.monotonic() < end:
        publisher.tick()
        pause.wait(every)


def test_ticks_keep_an_idle_connection_alive(vhost_url, open_publisher, quick_heartbeat):
    declare(vhost_url, "q")
    publisher = open_publisher(vhost_url)
    connection = publisher._broker._amqp
    assert connection.heartbeat == 1
    tick_for(publisher, seconds=5, every=0.2)
    row = outgoing(topic="q")

    assert publish(publisher, [row]) == all_confirmed([row])
    assert publisher._broker._amqp is connection


def test_without_ticks_the_broker_gives_the_connection_up_and_the_next_tick_says_so(vhost_url, open_publisher, quick_heartbeat):
    publisher = open_publisher(vhost_url)
    threading.Event().wait(5)

    with pytest.raises(BrokerUnavailable):
        publisher.tick()
    publisher.connect()
    publisher.tick()
