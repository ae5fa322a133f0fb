"""Every transport of kombu is RabbitMQ, in the table of what "published" means, or refused."""

import pytest
from kombu.transport import TRANSPORT_ALIASES

from outbox.errors import ConfigurationError, OutboxError
from outbox.publishers.factory import open_publisher, transport_name
from outbox.publishers.kombu import KombuPublisher
from outbox.publishers.rabbitmq import RabbitMQPublisher
from outbox.publishers.transports import TRANSPORTS, Acknowledged
from outbox.routes import Route, Routes

ROUTES = Routes()
UNCONFIRMED = {
    "confluentkafka": "kafka://host",
    "gcpubsub": "gcpubsub://projects/p",
    "pyro": "pyro://host/x",
    "qpid": "qpid://host",
    "librabbitmq": "librabbitmq://host",
    "SLMQ": "slmq://host",
}


def url_of(alias):
    return f"{alias}://" if alias in ("memory", "filesystem") else f"{alias}://host"


def test_the_table_names_no_transport_that_kombu_does_not_have():
    assert set(TRANSPORTS) <= {transport_name(url_of(alias)) for alias in TRANSPORT_ALIASES}


@pytest.mark.parametrize("alias", sorted(TRANSPORT_ALIASES))
def test_every_alias_is_rabbitmq_or_in_the_table_or_refused(alias):
    name = transport_name(url_of(alias))
    assert name not in ("", "Transport")
    if name in TRANSPORTS and TRANSPORTS[name].acknowledged is not Acknowledged.NOTHING:
        open_or_miss_a_package(url_of(alias))
    else:
        with pytest.raises(ConfigurationError, match="does not tell whether a message has arrived"):
            open_publisher(url_of(alias), ROUTES)


def open_or_miss_a_package(url, **options):
    """Open a publisher; where the package of its transport is missing, the text has to say so."""
    try:
        open_publisher(url, ROUTES, **options).close()
    except ConfigurationError as error:
        if "is the package that it needs installed?" not in str(error) and "cannot be used" not in str(error):
            raise


@pytest.mark.parametrize("name", sorted(UNCONFIRMED))
def test_what_cannot_know_is_refused_and_the_text_says_what_can_be_lost(name):
    with pytest.raises(ConfigurationError, match=f"{name}.*does not tell.*can be lost: .+ or say --allow-unconfirmed"):
        open_publisher(UNCONFIRMED[name], ROUTES)


@pytest.mark.parametrize("alias", sorted(TRANSPORT_ALIASES))
def test_with_the_flag_a_transport_opens_or_says_what_is_missing(alias):
    open_or_miss_a_package(url_of(alias), allow_unconfirmed=True)


@pytest.mark.parametrize(
    "url", ["amqp://h", "amqps://h", "pyamqp://h", "amqp://user:p%40ss@h:5672/v", "amqp://a;amqp://b", "amqp://"]
)
def test_rabbitmq_is_published_to_by_its_own_publisher(url):
    assert isinstance(open_publisher(url, ROUTES), RabbitMQPublisher)


@pytest.mark.parametrize("url", ["memory://", "sqla+sqlite:///x.db", "sqlalchemy+sqlite:///x.db", "filesystem://"])
def test_the_others_are_published_to_through_kombu(url):
    assert isinstance(open_publisher(url, ROUTES), KombuPublisher)


@pytest.mark.parametrize(
    "url",
    [
        "",
        "rabbit",
        "localhost:5672",
        "http://host",
        "amqp:/host",
        "://host",
        "amqp//",
        "AMQP://host",
        "postgresql://a:geheim@b/c",
    ],
)
def test_a_url_of_no_broker_is_refused_with_an_example_and_without_its_password(url):
    with pytest.raises(ConfigurationError, match="expected amqp://user:password@host:5672/vhost") as caught:
        open_publisher(url, ROUTES)

    assert "geheim" not in str(caught.value)


@pytest.mark.parametrize(
    "url", ["amqp://u:gehe/im@host/v", "amqp://u:geheim@host:port/v", "amqp://u:geheim@host:99999/v", "amqp://[::1/v"]
)
def test_a_url_that_cannot_be_taken_apart_is_refused_without_its_password(url):
    with pytest.raises(OutboxError, match="broker URL cannot be read") as caught:
        open_publisher(url, ROUTES)

    assert "gehe" not in str(caught.value)


@pytest.mark.parametrize(
    ("url", "exchange_type"), [("sqla+sqlite://", "fanout"), ("sqla+sqlite://", "headers"), ("memory://", "headers")]
)
def test_an_exchange_that_the_transport_would_drop_messages_in_is_refused(url, exchange_type):
    routes = Routes((Route("#", exchange="x", exchange_type=exchange_type),))

    with pytest.raises(ConfigurationError, match=f"has no {exchange_type} exchanges"):
        open_publisher(url, routes)
