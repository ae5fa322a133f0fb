"""Routes: which exchange and routing key a message goes to, and what cannot work."""

import pytest

from outbox.errors import ConfigurationError
from outbox.routes import Route, Routes
from outbox.wire import DEFAULT_EXCHANGE, Format
from tests.rows import outgoing


def test_without_routes_everything_goes_to_the_default_topic_exchange_by_its_topic():
    route = Routes().of("orders.placed")

    assert (route.exchange, route.exchange_type) == (DEFAULT_EXCHANGE, "topic")
    assert route.key_for(outgoing(topic="orders.placed")) == "orders.placed"


def test_the_first_route_that_selects_a_topic_wins():
    routes = Routes((Route("orders.*", exchange="first"), Route("orders.placed", exchange="second")))

    assert routes.of("orders.placed").exchange == "first"
    assert routes.of("orders.placed").exchange == "first", "also when asked again"
    assert routes.of("bills.sent").exchange == DEFAULT_EXCHANGE


def test_the_default_route_comes_last_unless_another_selects_everything():
    everything = Route("#", exchange="all")

    assert [route.exchange for route in Routes((Route("a", exchange="x"),)).all] == ["x", DEFAULT_EXCHANGE]
    assert Routes((everything,)).all == (everything,)


def test_a_routing_key_is_filled_in_from_the_message():
    route = Route("#", routing_key="{type}/{topic}/{key}")

    assert route.key_for(outgoing(topic="t", type="T", key="k{topic}")) == "T/t/k{topic}"
    assert route.key_for(outgoing(topic="t", type="T", key=None)) == "T/t/"


def test_braces_in_a_routing_key_can_be_doubled():
    assert Route("#", routing_key="{{{topic}}}").key_for(outgoing(topic="t")) == "{t}"


@pytest.mark.parametrize(
    "routing_key",
    [
        "{partition}",
        "{}",
        "{0}",
        "{topic",
        "topic}",
        "{topic[0]}",
        "{topic.name}",
        "{topic.__class__}",
        "{topic!r}",
        "{topic:>9}",
    ],
)
def test_a_routing_key_with_anything_but_the_three_names_is_refused(routing_key):
    with pytest.raises(ConfigurationError, match=r"may contain only \{topic\}, \{key\} and \{type\}"):
        Route("#", routing_key=routing_key)


@pytest.mark.parametrize("topics", ["", "a..b", "a*", "a b"])
def test_what_is_no_topic_pattern_is_refused(topics):
    with pytest.raises(ConfigurationError, match="is not a topic pattern"):
        Route(topics)


def test_an_unknown_exchange_type_is_refused_with_those_that_are_known():
    with pytest.raises(ConfigurationError, match="'topics'; use one of topic, direct, fanout, headers"):
        Route("#", exchange_type="topics")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("topics", 5),
        ("exchange", 5),
        ("exchange_type", ["topic"]),
        ("routing_key", 5),
        ("queues", "orders"),  # a list of six queues named by one letter each, were it taken
        ("queues", [5]),
        ("queues", [""]),
        ("declare", "false"),
    ],
)
def test_a_value_of_the_wrong_type_is_refused_and_named(name, value):
    with pytest.raises(ConfigurationError, match=name):
        Route(**{"topics": "#"} | {name: value})


@pytest.mark.parametrize("name", ["exchange", "routing_key"])
def test_what_no_broker_can_carry_is_refused(name):
    with pytest.raises(ConfigurationError, match=f"{name} .*255 bytes"):
        Route("#", **{name: "é" * 128})


def test_many_topics_do_not_grow_the_memory_of_routes_without_end():
    routes = Routes()
    for number in range(10_050):
        assert routes.of(f"orders.{number}").topics == "#"

    assert len(routes._found) <= 10_000


def test_a_format_may_be_given_by_its_name():
    routes = Routes((Route("a", format="outbox"),), format="cloudevents", source="/shop")

    assert (routes.format_of("a"), routes.format_of("b")) == (Format.OUTBOX, Format.CLOUDEVENTS)
    assert isinstance(routes.format_of("a"), Format)
    assert isinstance(routes.format_of("b"), Format)


def test_a_format_that_nobody_knows_is_refused():
    with pytest.raises(ConfigurationError, match="format is 'avro'; use one of outbox, cloudevents"):
        Routes(format="avro")
