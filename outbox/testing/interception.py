"""Records outgoing HTTP calls without a socket: in `http.client`, which urllib, urllib3 and requests use, and in httpx."""

from __future__ import annotations

import http.client
import io
from contextlib import ExitStack, contextmanager
from functools import partial
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from outbox.testing.recording import Recorder, Respond


class _NoSocket:
    """Stands where `http.client` expects a connected socket; has the answer ready when it is read."""

    def __init__(self, connection: Any, respond: Respond) -> None:
        self._connection = connection
        self._respond = respond

    def makefile(self, *_: Any, **__: Any) -> io.BytesIO:
        answer = self._respond(self._connection.outbox_request.call())
        fields = {**answer.headers, "Content-Length": str(len(answer.body)), "Connection": "close"}
        head = [f"HTTP/1.1 {answer.status} answered by the test", *(f"{name}: {value}" for name, value in fields.items())]
        return io.BytesIO("\r\n".join([*head, "", ""]).encode("latin-1") + answer.body)

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *_, **__: None  # settimeout, setsockopt, shutdown, close


@contextmanager
def intercepted(recorder: Recorder) -> Iterator[None]:
    """Record every call of this process into `recorder`, in all threads."""
    with ExitStack() as patches:
        _patch_http_client(patches, recorder)
        if find_spec("httpx") is not None:
            from outbox.testing.httpx_calls import patch_httpx

            patch_httpx(patches, recorder)
        yield


def _patch_http_client(patches: ExitStack, recorder: Recorder) -> None:
    base = http.client.HTTPConnection
    putrequest, send = base.putrequest, base.send

    def begin(connection: Any, *args: Any, **options: Any) -> None:
        if recorder.respond is not None and not isinstance(connection.sock, _NoSocket):
            if connection.sock is not None:  # kept alive from before
                connection.sock.close()
            connection.sock = _NoSocket(connection, recorder.respond)
        recorder.begin(connection)
        putrequest(connection, *args, **options)

    def note(connection: Any, data: Any) -> None:
        request = getattr(connection, "outbox_request", None)
        if request is not None and isinstance(data, bytes | bytearray | memoryview):
            request.sent += data
        if recorder.respond is None:
            send(connection, data)

    patches.enter_context(patch.object(base, "putrequest", begin))
    patches.enter_context(patch.object(base, "send", note))
    if recorder.respond is not None:
        _patch_connect(patches, _connecting(recorder.respond))


def _patch_connect(patches: ExitStack, connect: Callable[[Any], None]) -> None:
    """Replace `connect` in every class that has one of its own, and in connections of classes that are loaded later."""
    base = http.client.HTTPConnection
    initialise = base.__init__
    for kind in _with_connect(base):
        patches.enter_context(patch.object(kind, "connect", connect))

    def begin(connection: Any, *args: Any, **options: Any) -> None:
        initialise(connection, *args, **options)
        if getattr(type(connection), "connect", connect) is not connect:
            connection.connect = partial(connect, connection)
            patches.callback(vars(connection).pop, "connect", None)

    patches.enter_context(patch.object(base, "__init__", begin))


def _with_connect(kind: type[Any]) -> Iterator[type[Any]]:
    if "connect" in vars(kind):
        yield kind
    for each in kind.__subclasses__():
        yield from _with_connect(each)


def _connecting(respond: Respond) -> Callable[[Any], None]:
    def connect(connection: Any) -> None:
        connection.sock = _NoSocket(connection, respond)
        connection.is_verified = True  # urllib3 warns of a connection over TLS that is not

    return connect
