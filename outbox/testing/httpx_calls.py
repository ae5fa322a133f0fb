"""Records the calls of httpx, in the transports that all its clients use."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any
from unittest.mock import patch

from outbox.testing.calls import Answer, Call

if TYPE_CHECKING:
    from contextlib import ExitStack

    from outbox.testing.recording import Recorder


def patch_httpx(patches: ExitStack, recorder: Recorder) -> None:
    """Record into `recorder`, and answer what is not to go out."""
    import httpx

    plain, awaited = httpx.HTTPTransport.handle_request, httpx.AsyncHTTPTransport.handle_async_request

    def handle(transport: Any, request: Any) -> Any:
        answer = _noted(recorder, request, request.read())
        return plain(transport, request) if answer is None else _response(answer)

    async def handle_async(transport: Any, request: Any) -> Any:
        answer = _noted(recorder, request, await request.aread())
        return await awaited(transport, request) if answer is None else _response(answer)

    patches.enter_context(patch.object(httpx.HTTPTransport, "handle_request", handle))
    patches.enter_context(patch.object(httpx.AsyncHTTPTransport, "handle_async_request", handle_async))


def _noted(recorder: Recorder, request: Any, body: bytes) -> Answer | None:
    headers = {name.lower(): value for name, value in request.headers.items()}
    call = Call(request.method, str(request.url), headers, body)
    recorder.add(call)
    return None if recorder.respond is None else recorder.respond(call)


def _response(answer: Answer) -> Any:
    import httpx

    return httpx.Response(answer.status, headers=dict(answer.headers), content=answer.body)
