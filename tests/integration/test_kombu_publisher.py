"""The publisher on kombu's own transports; a plain consumer of kombu judges what arrived."""

import kombu
import pytest
import sqlalchemy as sa

from outbox.errors import BrokerUnavailable
from outbox.inbox.message import from_kombu
from outbox.publishers.kombu import KombuPublisher
from outbox.routes import Route, Routes
from outbox.states import Outcome
from outbox.wire import Format
from tests.rows import outgoing
from tests.servers.proc import free_port

# kombu's SQLAlchemy transport uses what SQLAlchemy 2.1 deprecates, and does what 2.0.0 warned of on SQLite
pytestmark = pytest.mark.filterwarnings(
    "ignore:The ``noload`` loader:sqlalchemy.exc.SADeprecationWarning",
    "ignore:Dialect sqlite:sqlalchemy.exc.SAWarning",
)

TO_ORDERS = Routes((Route("orders.#", exchange="shop", queues=["orders"]),))


class Steer:
    """A control that lets so many messages go."""

    def __init__(self, sends=10**9):
        self.sends, self.progressed = sends, 0

    def may_send(self):
        self.sends -= 1
        return self.sends >= 0

    def may_wait(self):
        return True

    def progress(self):
        self.progressed += 1


@pytest.fixture(params=["sqlalchemy", "memory"])
def url(request, tmp_path):
    """A broker of each kind, empty."""
    if request.param == "sqlalchemy":
        yield f"sqla+sqlite:///{tmp_path / 'broker.db'}"
        return
    yield "memory://"
    with kombu.Connection("memory://") as connection:  # all connections of a process share its queues
        connection.channel().queues.clear()
        connection.transport.state.clear()


@pytest.fixture
def open_publisher():
    made = []

    def open_publisher(url, routes=TO_ORDERS):
        publisher = KombuPublisher(url, routes)
        made.append(publisher)
        publisher.connect()
        return publisher

    yield open_publisher
    for publisher in made:
        publisher.close()


def arrived(url, queue="orders"):
    """Take everything out of a queue, as another process would."""
    with kombu.Connection(url) as connection:
        channel = connection.channel()
        channel.queue_declare(queue)
        messages = list(iter(kombu.Queue(queue, channel=channel).get, None))
        for message in messages:
            message.ack()
        return messages


def outcomes(published):
    assert published.lost is None
    return {number: verdict.outcome for number, verdict in published.verdicts.items()}


def ids_in(url, queue="orders"):
    return [message.properties["message_id"] for message in arrived(url, queue)]


def ids_of(rows):
    return [str(row.message_id) for row in rows]


def test_a_message_arrives_exactly_as_it_was(url, open_publisher):
    row = outgoing(
        key="o-1", payload=b"\x00\xff\x01", content_type="application/x-thing", type="Placed",
        headers={"text": "č", "yes": True, "no": None, "big": 2**62},
    )  # fmt: skip
    assert outcomes(open_publisher(url).publish([row], Steer())) == {1: Outcome.CONFIRMED}

    (message,) = arrived(url)
    assert message.body == b"\x00\xff\x01"
    assert (message.content_type, message.content_encoding) == ("application/x-thing", "binary")
    assert message.headers == row.headers | {"outbox-topic": "orders.placed", "outbox-key": "o-1"}
    assert message.properties["message_id"] == str(row.message_id)
    assert message.properties["type"] == "Placed"
    assert message.properties["timestamp"] == int(row.created_at.timestamp())
    assert message.delivery_info["routing_key"] == "orders.placed"


@pytest.mark.parametrize("form", [Format.CLOUDEVENTS, Format.STRUCTURED])
@pytest.mark.parametrize("payload", [b"\x00\xff", '{"name":"č"}'.encode(), b""])
def test_a_cloud_event_arrives_and_our_consumer_sees_the_same_message(url, open_publisher, form, payload):
    row = outgoing(key="o-1", payload=payload, headers={"tenant": "north"})
    routes = Routes(TO_ORDERS.routes, format=form, source="/shop")
    assert outcomes(open_publisher(url, routes).publish([row], Steer())) == {1: Outcome.CONFIRMED}

    message = from_kombu(*arrived(url))
    assert (message.message_id, message.payload, message.key) == (str(row.message_id), payload, "o-1")
    assert (message.content_type, message.type) == ("application/json", "orders.placed")
    assert {"tenant": "north", "cloudEvents_tenant": "north", "cloudEvents_source": "/shop"}.items() <= message.headers.items()


def test_a_json_payload_is_encoded_once(url, open_publisher):
    open_publisher(url).publish([outgoing(payload='{"name": "č"}'.encode())], Steer())

    assert arrived(url)[0].payload == {"name": "č"}


def test_many_arrive_in_order_and_each_counts_as_progress(url, open_publisher):
    rows = [outgoing(number, f"key-{number % 3}") for number in range(1, 51)]
    control = Steer()
    assert set(outcomes(open_publisher(url).publish(rows, control)).values()) == {Outcome.CONFIRMED}

    assert ids_in(url) == ids_of(rows)
    assert control.progressed == 50


def test_what_no_queue_is_bound_for_is_rejected_and_its_neighbours_arrive(url, open_publisher):
    rows = [outgoing(1), outgoing(2, topic="bills.sent"), outgoing(3)]
    published = open_publisher(url).publish(rows, Steer())

    assert outcomes(published) == {1: Outcome.CONFIRMED, 2: Outcome.REJECTED, 3: Outcome.CONFIRMED}
    assert published.verdicts[2].reason == "broker: unroutable: no queue is bound to exchange 'outbox' for 'bills.sent'"
    assert ids_in(url) == ids_of([rows[0], rows[2]])


def test_after_a_rejection_the_rest_of_the_key_is_held(url, open_publisher):
    rows = [outgoing(1, "a", topic="bills.sent"), outgoing(2, "a"), outgoing(3, "b")]

    assert outcomes(open_publisher(url).publish(rows, Steer())) == {1: Outcome.REJECTED, 2: Outcome.HELD, 3: Outcome.CONFIRMED}


def test_a_topic_exchange_matches_patterns_and_every_binding_counts(url, open_publisher):
    routes = Routes(
        (Route("orders.*", exchange="shop", queues=["orders", "audit"]), Route("#.late", exchange="shop", queues=["orders"]))
    )
    rows = [outgoing(1, topic="orders.placed"), outgoing(2, topic="bills.very.late")]
    assert set(outcomes(open_publisher(url, routes).publish(rows, Steer())).values()) == {Outcome.CONFIRMED}

    assert ids_in(url) == ids_of(rows)
    assert ids_in(url, "audit") == ids_of(rows[:1])


def test_a_direct_exchange_needs_a_routing_key_that_a_queue_is_bound_for(url, open_publisher):
    routes = Routes((Route("orders", exchange="direct", exchange_type="direct", queues=["orders"]),))
    row = outgoing(topic="orders")
    assert outcomes(open_publisher(url, routes).publish([row], Steer())) == {1: Outcome.CONFIRMED}

    assert ids_in(url) == ids_of([row])


def test_the_default_exchange_puts_into_the_queue_of_the_routing_keys_name(url, open_publisher):
    routes = Routes((Route("#", exchange="", routing_key="{type}"),))
    row = outgoing(type="orders")
    assert outcomes(open_publisher(url, routes).publish([row], Steer())) == {1: Outcome.CONFIRMED}

    assert ids_in(url) == ids_of([row])


def test_what_may_not_be_sent_any_more_is_unsent(url, open_publisher):
    rows = [outgoing(number) for number in range(1, 6)]
    found = outcomes(open_publisher(url).publish(rows, Steer(sends=2)))

    assert [found[number] for number in range(1, 6)] == [Outcome.CONFIRMED] * 2 + [Outcome.UNSENT] * 3
    assert ids_in(url) == ids_of(rows[:2])


def test_what_the_transport_cannot_carry_is_unpublishable_and_its_neighbours_arrive(tmp_path, open_publisher):
    url = f"sqla+sqlite:///{tmp_path / 'broker.db'}"
    rows = [outgoing(1), outgoing(2, headers={"h": object()}), outgoing(3, headers=["no", "mapping"]), outgoing(4)]
    published = open_publisher(url).publish(rows, Steer())

    assert [outcome for _, outcome in sorted(outcomes(published).items())] == [
        Outcome.CONFIRMED,
        Outcome.UNPUBLISHABLE,
        Outcome.UNPUBLISHABLE,
        Outcome.CONFIRMED,
    ]
    assert published.verdicts[2].reason.startswith("the transport cannot carry it: ")
    assert ids_in(url) == ids_of([rows[0], rows[3]])


def test_a_publisher_that_was_closed_connects_again(url, open_publisher):
    publisher = open_publisher(url)
    rows = [outgoing(1), outgoing(2)]
    publisher.publish(rows[:1], Steer())
    publisher.close()
    publisher.close()
    publisher.connect()

    assert outcomes(publisher.publish(rows[1:], Steer())) == {2: Outcome.CONFIRMED}
    assert ids_in(url) == ids_of(rows)


def test_a_store_that_fails_makes_the_message_unknown_the_rest_unsent_and_works_again_later(tmp_path, open_publisher):
    url = f"sqla+sqlite:///{tmp_path / 'broker.db'}"
    publisher = open_publisher(url)
    rows = [outgoing(number) for number in range(1, 4)]
    engine = sa.create_engine(url.removeprefix("sqla+"), poolclass=sa.NullPool)
    with engine.begin() as connection:
        connection.execute(sa.text("ALTER TABLE kombu_message RENAME TO elsewhere"))
    published = publisher.publish(rows, Steer())

    assert isinstance(published.lost, BrokerUnavailable)
    assert "no such table: kombu_message" in str(published.lost)
    assert "INSERT" not in str(published.lost)
    found = {number: verdict.outcome for number, verdict in published.verdicts.items()}
    assert found == {1: Outcome.UNKNOWN, 2: Outcome.UNSENT, 3: Outcome.UNSENT}

    with engine.begin() as connection:
        connection.execute(sa.text("ALTER TABLE elsewhere RENAME TO kombu_message"))
    publisher.connect()
    assert set(outcomes(publisher.publish(rows, Steer())).values()) == {Outcome.CONFIRMED}


def test_a_store_that_cannot_be_opened_is_unavailable(tmp_path):
    publisher = KombuPublisher(f"sqla+sqlite:///{tmp_path / 'absent' / 'broker.db'}", TO_ORDERS)
    with pytest.raises(BrokerUnavailable, match=r"^broker: .*unable to open database file"):
        publisher.connect()

    (tmp_path / "absent").mkdir()
    publisher.connect()
    assert outcomes(publisher.publish([outgoing()], Steer())) == {1: Outcome.CONFIRMED}
    publisher.close()


def test_a_database_that_is_away_is_unavailable_without_its_password():
    publisher = KombuPublisher(f"sqla+postgresql+psycopg://app:geheim@127.0.0.1:{free_port()}/x", TO_ORDERS)
    with pytest.raises(BrokerUnavailable, match=r"^broker: ") as caught:
        publisher.connect()

    assert "geheim" not in str(caught.value)
    publisher.close()


def test_publishing_without_a_connection_is_lost_and_all_unsent(url):
    publisher = KombuPublisher(url, TO_ORDERS)
    published = publisher.publish([outgoing(1), outgoing(2)], Steer())

    assert isinstance(published.lost, BrokerUnavailable)
    assert {verdict.outcome for verdict in published.verdicts.values()} == {Outcome.UNSENT}
    publisher.tick()
    publisher.close()


def test_the_names_of_a_route_reach_the_store_of_another_process(tmp_path, open_publisher):
    """The store keeps queues but not the bindings: the relay, which declares them, finds its own."""
    url = f"sqla+sqlite:///{tmp_path / 'broker.db'}"
    open_publisher(url).close()
    again = open_publisher(url)

    assert outcomes(again.publish([outgoing()], Steer())) == {1: Outcome.CONFIRMED}
    assert len(ids_in(url)) == 1
