"""A small HTTP server in threads of its own, which slow, many and hostile clients can neither fill nor hold up."""

from __future__ import annotations

import logging
import socket
import threading
import time
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler
from socketserver import TCPServer
from typing import TYPE_CHECKING, Any

from outbox.errors import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

log = logging.getLogger("outbox.http")

MOST_AT_ONCE = 8
REQUEST_LIMIT_S = 5.0
_LOOK_EVERY_S = 0.5
_STOP_S = 2.0


@dataclass(frozen=True, slots=True)
class Reply:
    """What a request is answered with."""

    status: HTTPStatus
    content_type: str
    body: str


@contextmanager
def listening(name: str, address: tuple[str, int], answer: Callable[[str, str], Reply | None]) -> Iterator[tuple[str, int]]:
    """Answer GET and HEAD with what `answer(target, accept)` returns (None: 404) while the block runs; give the real address.

    At most eight requests are under way; when one more comes, the oldest is dropped, as is any that takes longer than five
    seconds in all. Raises `ConfigurationError` when the address cannot be listened on.
    """
    try:
        server = _Server(address, answer)
    except (OSError, OverflowError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        message = f"{name}: cannot listen on {address[0]}:{address[1]}: {reason}; use another address or port"
        raise ConfigurationError(message) from error
    thread = threading.Thread(target=server.serve_forever, args=(_LOOK_EVERY_S,), name=f"outbox-{name}", daemon=True)
    thread.start()
    host, port = server.server_address[:2]
    log.info("listening", extra={"for": name, "host": host, "port": port})
    try:
        yield str(host), int(port)
    finally:
        server.stop()
        thread.join()


class _Server(TCPServer):
    """Each request in a thread; the thread of `serve_forever` counts them and drops those that take too long."""

    allow_reuse_address = True
    request_queue_size = 32

    def __init__(self, address: tuple[str, int], answer: Callable[[str, str], Reply | None]) -> None:
        self.answer = answer
        self._free = threading.BoundedSemaphore(MOST_AT_ONCE)
        self._lock = threading.Lock()
        self._began: dict[socket.socket, float] = {}
        self.address_family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
        super().__init__(address, _Handler)

    def process_request(self, request: Any, client_address: Any) -> None:
        """Answer in a thread of its own, as soon as there is room for it."""
        if not self._free.acquire(blocking=False):
            self._drop_oldest()
            if not self._free.acquire(timeout=_LOOK_EVERY_S):
                self.shutdown_request(request)
                return
        with self._lock:
            self._began[request] = time.monotonic()
        threading.Thread(target=self._process, args=(request, client_address), name="outbox-http", daemon=True).start()

    def _process(self, request: socket.socket, client_address: Any) -> None:
        try:
            with suppress(OSError, ValueError):  # the client has gone, or was dropped
                self.finish_request(request, client_address)
        finally:
            with self._lock:
                self._began.pop(request, None)
                self.shutdown_request(request)
            self._free.release()

    def service_actions(self) -> None:
        """Drop, between accepts, what has taken too long."""
        self._drop(older_than_s=REQUEST_LIMIT_S)

    def _drop(self, *, older_than_s: float) -> None:
        with self._lock:
            now = time.monotonic()
            for request in [request for request, began in self._began.items() if now - began > older_than_s]:
                _break(request)

    def _drop_oldest(self) -> None:
        with self._lock:
            oldest = min(self._began, key=lambda request: self._began[request], default=None)
            if oldest is not None:
                _break(oldest)

    def stop(self) -> None:
        """Listen no more, drop what is under way, and wait for its threads, but not for long."""
        self.shutdown()
        self.server_close()
        self._drop(older_than_s=-1)
        deadline = time.monotonic() + _STOP_S
        for _ in range(MOST_AT_ONCE):
            self._free.acquire(timeout=max(0.0, deadline - time.monotonic()))


def _break(request: socket.socket) -> None:
    with suppress(OSError):
        request.shutdown(socket.SHUT_RDWR)  # whoever reads or writes it wakes up


class _Handler(BaseHTTPRequestHandler):
    """One request per connection: HTTP/1.0 keeps none open."""

    timeout = REQUEST_LIMIT_S
    server_version = "outbox"
    sys_version = ""
    error_message_format = "%(code)d %(message)s\n"
    error_content_type = "text/plain; charset=utf-8"
    server: _Server

    def do_GET(self) -> None:
        reply = self.server.answer(self.path, self.headers.get("Accept", ""))
        if reply is None:
            self.send_error(HTTPStatus.NOT_FOUND)
            return
        body = reply.body.encode()
        self.send_response(reply.status)
        self.send_header("Content-Type", reply.content_type)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Cache-Control", "no-store")
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    do_HEAD = do_GET  # noqa: N815 - the standard library's name

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - the standard library's name
        """Log each request for those who look closely: probes come every few seconds."""
        log.debug("request", extra={"client": self.client_address[0], "said": format % args})
