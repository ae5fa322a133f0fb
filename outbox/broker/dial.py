"""How a kombu connection is set up, and what kind of broker it leads to."""

from __future__ import annotations

import socket
from contextlib import suppress
from typing import Any

import kombu

from outbox import urls
from outbox.broker import tls
from outbox.broker.errors import LOST
from outbox.errors import BrokerUnavailable, ConfigurationError, MissingExtra

HEARTBEAT_S = 30
NOT_A_URL = "the broker URL cannot be read; expected amqp://user:password@host:5672/vhost or another kombu URL"
_CONNECT_TIMEOUT_S = 5
_STALL_S = 20
_AMQP_OPTIONS: dict[str, Any] = {"read_timeout": _STALL_S}  # for the answer to a declaration; deliveries are waited for elsewhere
if hasattr(socket, "TCP_USER_TIMEOUT"):  # py-amqp's default of 1 s ends a connection that merely stalls
    _AMQP_OPTIONS["socket_settings"] = {socket.TCP_USER_TIMEOUT: _STALL_S * 1000}
_REDIS_OPTIONS = {"socket_timeout": _STALL_S}  # redis-py's default is for ever, also for the handshake of TLS


class Dialler:
    """Prepares connections to a broker, one for each attempt: what of the URL is in files, and the certificates, are read anew.

    Of several URLs (`amqp://a;amqp://b`) the next one has its turn after `failed`. `amqp_options` are for py-amqp's own
    `Connection`. Raises `ConfigurationError` or `MissingExtra` for a URL of no use.
    """

    def __init__(self, url: str, **amqp_options: Any) -> None:
        self._url = url
        self._amqp_options = _AMQP_OPTIONS | amqp_options
        self._turn = 0
        for each in urls.all_current(url):
            self._prepare(each)

    def connection(self) -> kombu.Connection:
        """Prepare a connection, without connecting. Raises `BrokerUnavailable` if what is in files is of no use by now."""
        try:
            several = urls.all_current(self._url)
            return self._prepare(several[self._turn % len(several)])
        except ConfigurationError as error:
            raise BrokerUnavailable(f"broker: {error}") from error

    def failed(self) -> None:
        """Note that the last connection was of no use."""
        self._turn += 1

    def _prepare(self, url: str) -> kombu.Connection:
        url, options = tls.taken_from(url)
        try:
            connection = kombu.Connection(url, heartbeat=HEARTBEAT_S, connect_timeout=_CONNECT_TIMEOUT_S, ssl=_ssl(url, options))
            if is_amqp(connection):
                connection.transport_options.update(self._amqp_options)
            elif url.startswith(("redis://", "rediss://")):
                connection.transport_options.update(_REDIS_OPTIONS)
        except ImportError as error:
            raise MissingExtra(f"this broker URL needs a package that is not installed: {error}") from error
        except TypeError as error:
            raise ConfigurationError("the broker URL has an option in its query that its transport does not know") from error
        except (KeyError, ValueError) as error:  # its text may hold a part of the password
            raise ConfigurationError(NOT_A_URL) from error
        return connection


def is_amqp(connection: kombu.Connection) -> bool:
    """Tell whether the broker speaks AMQP, rather than being one of kombu's virtual transports."""
    return bool(connection.get_transport_cls().driver_type == "amqp")


def connected(connection: Any) -> None:
    """Give a new connection of py-amqp the patience that it has without TLS: there it keeps that of its handshake."""
    if connection.sock.gettimeout() is not None:
        connection.sock.settimeout(_STALL_S)


def hang_up(connection: Any) -> None:
    """Close the socket of py-amqp's connection at once: with TLS it would wait for the other side to say goodbye."""
    with suppress(*LOST):
        if connection.connected:
            connection.sock.settimeout(0)
    with suppress(*LOST):
        connection.collect()


def _ssl(url: str, options: dict[str, Any]) -> Any:
    scheme = url.partition("://")[0]
    if scheme == "amqps":
        return tls.for_amqp(url, options)
    return tls.for_redis(options) if scheme == "rediss" else False
