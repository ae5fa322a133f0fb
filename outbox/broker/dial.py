"""How a kombu connection is set up, and what kind of broker it leads to."""

from __future__ import annotations

import socket
from typing import Any

import kombu

from outbox.errors import ConfigurationError, MissingExtra

HEARTBEAT_S = 30
NOT_A_URL = "the broker URL cannot be read; expected amqp://user:password@host:5672/vhost or another kombu URL"
_CONNECT_TIMEOUT_S = 5
_AMQP_OPTIONS: dict[str, Any] = {"read_timeout": 20}  # for the answer to a declaration; deliveries are waited for elsewhere
if hasattr(socket, "TCP_USER_TIMEOUT"):  # py-amqp's default of 1 s ends a connection that merely stalls
    _AMQP_OPTIONS["socket_settings"] = {socket.TCP_USER_TIMEOUT: 20_000}


def dial(url: str, **amqp_options: Any) -> kombu.Connection:
    """Prepare a connection, without connecting; `amqp_options` are for py-amqp's own `Connection`.

    Raises `ConfigurationError` or `MissingExtra` for a URL of no use.
    """
    try:
        connection = kombu.Connection(url, heartbeat=HEARTBEAT_S, connect_timeout=_CONNECT_TIMEOUT_S)
        if is_amqp(connection):
            connection.transport_options.update(_AMQP_OPTIONS | amqp_options)
    except ImportError as error:
        raise MissingExtra(f"this broker URL needs a package that is not installed: {error}") from error
    except (KeyError, ValueError) as error:  # its text may hold a part of the password
        raise ConfigurationError(NOT_A_URL) from error
    return connection


def is_amqp(connection: kombu.Connection) -> bool:
    """Tell whether the broker speaks AMQP, rather than being one of kombu's virtual transports."""
    return bool(connection.get_transport_cls().driver_type == "amqp")
