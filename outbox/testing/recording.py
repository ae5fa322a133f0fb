"""Keeps the HTTP calls that were made: in full, or as the bytes that `http.client` would have sent."""

from __future__ import annotations

import http.client
import io
from typing import TYPE_CHECKING, Any

from outbox.testing.calls import Answer, Call

if TYPE_CHECKING:
    from collections.abc import Callable

    Respond = Callable[[Call], Answer]


class Recorder:
    """The calls that were made, in order, and what answers them; `respond=None` lets them go out."""

    def __init__(self, respond: Respond | None) -> None:
        self.respond = respond
        self._requests: list[Call | Request] = []

    def begin(self, connection: Any) -> None:
        """Note that a request begins on a connection of `http.client`."""
        connection.outbox_request = Request(connection)
        self._requests.append(connection.outbox_request)

    def add(self, call: Call) -> None:
        """Note a call that is known in full."""
        self._requests.append(call)

    def take(self) -> list[Call]:
        """Return the calls since the last time, and forget them."""
        taken, self._requests = self._requests, []
        return [each.call() if isinstance(each, Request) else each for each in taken]


class Request:
    """The bytes of one request."""

    def __init__(self, connection: Any) -> None:
        host, port = connection._tunnel_host or connection.host, connection._tunnel_port or connection.port  # noqa: SLF001
        is_https = isinstance(connection, http.client.HTTPSConnection) or connection.default_port == http.client.HTTPS_PORT
        scheme, usual = ("https", http.client.HTTPS_PORT) if is_https else ("http", http.client.HTTP_PORT)
        self._origin = f"{scheme}://{host}" if port in (None, usual) else f"{scheme}://{host}:{port}"
        self.sent = bytearray()

    def call(self) -> Call:
        """Return it as a value."""
        head, _, rest = bytes(self.sent).partition(b"\r\n\r\n")
        line, _, lines = head.partition(b"\r\n")
        method, _, target = line.decode("latin-1").rpartition(" ")[0].partition(" ")
        fields = http.client.parse_headers(io.BytesIO(lines + b"\r\n\r\n"))
        headers = {name.lower(): value for name, value in fields.items()}
        body = _unchunked(rest) if headers.get("transfer-encoding", "").lower() == "chunked" else rest
        return Call(method, target if "://" in target else self._origin + target, headers, body)


def _unchunked(data: bytes) -> bytes:
    body = b""
    while data:
        size, _, rest = data.partition(b"\r\n")
        length = int(size.partition(b";")[0] or b"0", 16)
        body, data = body + rest[:length], rest[length + 2 :] if length else b""
    return body
