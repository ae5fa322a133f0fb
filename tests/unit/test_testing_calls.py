"""Interception of HTTP: every library's call is seen as it is, nothing leaves the process, and afterwards all is as before."""

import asyncio
import http.client
import http.server
import io
import threading
import urllib.request
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest
import requests

from outbox.testing.calls import Answer
from outbox.testing.interception import intercepted
from outbox.testing.recording import Recorder

URL = "https://provider.example:8443/charges?currency=eur"


def by_http_client() -> bytes:
    connection = http.client.HTTPSConnection("provider.example", 8443)
    connection.request("POST", "/charges?currency=eur", body=b"5 euros", headers={"Idempotency-Key": "k-1"})
    return connection.getresponse().read()


def by_urllib() -> bytes:
    request = urllib.request.Request(URL, data=b"5 euros", headers={"Idempotency-Key": "k-1"})
    with urllib.request.urlopen(request) as response:
        return response.read()


def by_requests() -> bytes:
    with requests.Session() as session:
        return session.post(URL, data=b"5 euros", headers={"Idempotency-Key": "k-1"}, timeout=1).content


def by_requests_in_chunks() -> bytes:
    with requests.Session() as session:
        return session.post(URL, data=iter([b"5 ", b"euros"]), headers={"Idempotency-Key": "k-1"}, timeout=1).content


def by_requests_from_a_file() -> bytes:
    with requests.Session() as session:
        return session.post(URL, data=io.BytesIO(b"5 euros"), headers={"Idempotency-Key": "k-1"}, timeout=1).content


def by_httpx() -> bytes:
    return httpx.post(URL, content=b"5 euros", headers={"Idempotency-Key": "k-1"}).content


def by_httpx_async() -> bytes:
    async def post() -> bytes:
        async with httpx.AsyncClient() as client:
            return (await client.post(URL, content=b"5 euros", headers={"Idempotency-Key": "k-1"})).content

    return asyncio.run(post())


WAYS = [by_http_client, by_urllib, by_requests, by_requests_in_chunks, by_requests_from_a_file, by_httpx, by_httpx_async]


@pytest.mark.parametrize("send", WAYS)
def test_a_call_is_seen_as_it_is_and_answered(send: Callable[[], bytes]) -> None:
    recorder = Recorder(lambda call: Answer(201, b"thanks for " + call.body))
    with intercepted(recorder):
        assert send() == b"thanks for 5 euros"
        assert send() == b"thanks for 5 euros"
    first, second = recorder.take()
    assert (first.method, first.url, first.body, first.headers["idempotency-key"]) == ("POST", URL, b"5 euros", "k-1")
    assert (second.method, second.url, second.body) == (first.method, first.url, first.body)
    assert recorder.take() == []


def test_an_error_status_is_an_error_for_the_caller() -> None:
    with intercepted(Recorder(lambda _call: Answer(503))):
        with pytest.raises(requests.HTTPError):
            requests.get(URL, timeout=1).raise_for_status()
        with pytest.raises(urllib.request.HTTPError) as error:
            urllib.request.urlopen(URL)
        error.value.close()


class Server(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(200)
        self.send_header("Content-Length", "4")
        self.end_headers()
        self.wfile.write(b"real")

    def log_message(self, *_: Any) -> None: ...


@pytest.fixture
def server() -> Iterator[str]:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Server) as listening:
        thread = threading.Thread(target=listening.serve_forever, args=(0.01,))
        thread.start()
        yield f"http://127.0.0.1:{listening.server_port}/charges"
        listening.shutdown()
        thread.join()


def test_calls_can_be_let_out_and_are_still_seen(server: str) -> None:
    recorder = Recorder(None)
    with intercepted(recorder), requests.Session() as session:
        assert session.post(server, data=b"1", timeout=5).content == b"real"
        assert httpx.post(server, content=b"2").content == b"real"
        request = urllib.request.Request(server, data=b"3")
        with urllib.request.urlopen(request) as response:
            assert response.read() == b"real"
    assert [(call.url, call.body) for call in recorder.take()] == [(server, b"1"), (server, b"2"), (server, b"3")]


def test_a_session_from_before_and_one_that_stays_work_as_usual(server: str) -> None:
    with requests.Session() as before, requests.Session() as inside:
        assert before.post(server, data=b"1", timeout=5).content == b"real"
        with intercepted(Recorder(lambda _call: Answer(200, b"answered"))):
            assert before.post(server, data=b"1", timeout=5).content == b"answered"
            assert inside.post(server, data=b"1", timeout=5).content == b"answered"
        assert before.post(server, data=b"1", timeout=5).content == b"real"
        assert inside.post(server, data=b"1", timeout=5).content == b"real"


def test_what_goes_through_a_proxy_is_known_by_its_own_host() -> None:
    recorder = Recorder(lambda _call: Answer())
    with intercepted(recorder):
        requests.get(URL, proxies={"https": "http://proxy.example:3128"}, timeout=1)
        connection = http.client.HTTPSConnection("proxy.example", 3128)
        connection.set_tunnel("provider.example", 8443)
        connection.request("GET", "/charges?currency=eur")
        connection.getresponse().read()
    assert [(call.method, call.url) for call in recorder.take()] == [("GET", URL)] * 2
