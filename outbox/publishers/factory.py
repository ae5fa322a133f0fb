"""Chooses the publisher for a broker URL."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kombu.transport import TRANSPORT_ALIASES

from outbox import urls
from outbox.errors import ConfigurationError
from outbox.publishers.kombu import KombuPublisher
from outbox.publishers.rabbitmq import CONFIRM_TIMEOUT_S, RabbitMQPublisher
from outbox.publishers.transports import TRANSPORTS, UNKNOWN, Acknowledged
from outbox.rqjob import SCHEME

if TYPE_CHECKING:
    from outbox.publishers.base import Publisher
    from outbox.routes import Routes

_NOT_A_URL = "the broker URL cannot be read; expected amqp://user:password@host:5672/vhost or another kombu URL"


def open_publisher(
    url: str, routes: Routes, *, allow_unconfirmed: bool = False, confirm_timeout_s: float = CONFIRM_TIMEOUT_S
) -> Publisher:
    """Return the publisher for a kombu URL, or for RQ's queues on Redis for `rq+` and a URL of Redis. Does not connect.

    Raises `ConfigurationError` for a URL that cannot work, and for a transport that cannot tell whether a message
    has arrived, unless `allow_unconfirmed`.
    """
    now = urls.current(url)
    if now.startswith(SCHEME):
        return _rq_publisher(url, timeout_s=confirm_timeout_s)
    name = transport_name(now)
    if name == "pyamqp":
        try:
            return RabbitMQPublisher(url, routes, confirm_timeout_s=confirm_timeout_s)
        except ValueError as error:  # its text may hold a part of the password
            raise ConfigurationError(_NOT_A_URL) from error
    transport = TRANSPORTS.get(name, UNKNOWN)
    if transport.acknowledged is Acknowledged.NOTHING and not allow_unconfirmed:
        message = (
            f"broker transport {name!r} does not tell whether a message has arrived (can be lost: {transport.loss}); "
            "use another one, or say --allow-unconfirmed"
        )
        raise ConfigurationError(message)
    try:
        return KombuPublisher(url, routes)
    except ConfigurationError:
        raise
    except ValueError as error:
        raise ConfigurationError(_NOT_A_URL) from error
    except (
        Exception
    ) as error:  # without its package one transport raises ImportError, others AttributeError, NameError, RuntimeError
        message = f"broker transport {name!r} cannot be loaded; is the package that it needs installed? ({error})"
        raise ConfigurationError(message) from error


def _rq_publisher(url: str, *, timeout_s: float) -> Publisher:
    from outbox.publishers.rq import RqPublisher  # RQ is optional

    return RqPublisher(url, timeout_s=timeout_s)


def transport_name(url: str) -> str:
    """Return the name of kombu's transport module for a URL, e.g. `pyamqp`. Raises `ConfigurationError`."""
    scheme, separator, _ = url.partition("://")
    alias = TRANSPORT_ALIASES.get(scheme.partition("+")[0])
    if not separator or alias is None:
        raise ConfigurationError(_NOT_A_URL)
    return str(alias).replace(":", ".").split(".")[-2]
