"""Checks of the broker by its own protocol: that it is there, and has what the routes lead to. Nothing is declared or published."""

from __future__ import annotations

from contextlib import closing, contextmanager
from typing import TYPE_CHECKING, Any

from amqp.exceptions import AccessRefused, ChannelError, NotFound

from outbox.broker.dial import Dialler, connected, is_amqp
from outbox.broker.errors import LOST, describe
from outbox.doctor.findings import problem, warning
from outbox.errors import BrokerUnavailable, ConfigurationError
from outbox.publishers.factory import open_publisher
from outbox.rqjob import SCHEME

if TYPE_CHECKING:
    from collections.abc import Iterator

    from outbox.doctor.findings import Finding
    from outbox.doctor.scope import Broker

_GOODBYE_S = 1.0


def reachable(broker: Broker) -> Iterator[Finding]:
    """The broker can be reached, lets us in, and tells whether messages arrive."""
    try:
        open_publisher(broker.url, broker.scope.routes, allow_unconfirmed=broker.scope.allow_unconfirmed)
    except ConfigurationError as error:
        yield problem(str(error), "the relay does not start", "another --broker-url, or --allow-unconfirmed")
        return
    _knock(broker.url)


def exchanges(broker: Broker) -> Iterator[Finding]:
    """Every exchange that a route leads to is there."""
    with _connection(broker.url) as connection:
        for route in broker.scope.routes.all:
            if not route.exchange:
                continue
            if isinstance(
                _passively(connection, "exchange_declare", exchange=route.exchange, type=route.exchange_type), NotFound
            ):
                finding = warning if route.declare else problem
                yield finding(
                    f"exchange {route.exchange}, of the route for {route.topics}, is not there",
                    "messages of these topics cannot be published",
                    "the relay makes it when it next connects; restart it, if the exchange was deleted since"
                    if route.declare
                    else "declare it, or let the relay do so (declare = true)",
                )


def queues(broker: Broker) -> Iterator[Finding]:
    """Every queue that a route names is there, and somebody consumes it."""
    with _connection(broker.url) as connection:
        for queue in _queues_of_routes(broker):
            found = _passively(connection, "queue_declare", queue=queue)
            if isinstance(found, NotFound):
                yield problem(
                    f"queue {queue}, that a route names, is not there",
                    "messages for it cannot be delivered, or are gone with it",
                    "start the consumer that declares it, or restart the relay, which declares the queues of its routes",
                )
            elif not isinstance(found, ChannelError) and found.message_count and not found.consumer_count:
                yield warning(
                    f"queue {queue} has {found.message_count} messages and no consumer",
                    "nobody handles them",
                    "start its consumer (outbox-consume), or look at its log",
                )


def _queues_of_routes(broker: Broker) -> list[str]:
    found = dict.fromkeys(queue for route in broker.scope.routes.all for queue in route.queues)
    direct = (route.routing_key for route in broker.scope.routes.all if not route.exchange and "{" not in route.routing_key)
    return list(found | dict.fromkeys(direct))


def _knock(url: str) -> None:
    """Connect, log in, and leave. Raises `BrokerUnavailable`, or whatever else a broker's client raises when it cannot."""
    if url.startswith(SCHEME):
        from outbox.publishers.rq_redis import dial as dial_redis  # RQ is optional

        with closing(dial_redis(url, timeout_s=5)[0]) as client:
            client.ping()
        return
    with Dialler(url).connection() as connection:
        if is_amqp(connection):
            _hang_up(connection.transport.establish_connection())
        else:
            connection.channel().close()


@contextmanager
def _connection(url: str) -> Iterator[Any]:
    try:
        connection = Dialler(url).connection().transport.establish_connection()
        connected(connection)
    except LOST as error:
        raise BrokerUnavailable(describe(error)) from error
    try:
        yield connection
    finally:
        _hang_up(connection)


def _passively(connection: Any, method: str, **what: Any) -> Any:
    """Ask whether something is there; return what the broker says of it, or its error: that it is not, or that we may not ask."""
    channel = connection.channel()  # of its own, because what is missing closes it
    try:
        return getattr(channel, method)(passive=True, **what)
    except (NotFound, AccessRefused, ChannelError) as error:
        return error
    finally:
        channel.close()


def _hang_up(connection: Any) -> None:
    connection.sock.settimeout(_GOODBYE_S)
    connection.close()
