"""A payment provider: an HTTP server that charges once per Idempotency-Key, whatever it is asked."""

import json
import threading
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class Provider(ThreadingHTTPServer):
    """`requests`: the key of each request, in order. `charges`: what was charged, by key."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Requests)
        self.requests: list[str] = []
        self.charges: dict[str, dict[str, Any]] = {}
        self._lock = threading.Lock()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/charges"

    def charge(self, key: str, amount: int) -> dict[str, Any]:
        with self._lock:
            self.requests.append(key)
            return self.charges.setdefault(key, {"id": f"ch_{len(self.charges)}", "amount": amount})


class _Requests(BaseHTTPRequestHandler):
    server: Provider

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        answer = json.dumps(self.server.charge(self.headers["Idempotency-Key"], asked["amount"])).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    def log_message(self, *_: object) -> None:
        pass


@contextmanager
def provider() -> Iterator[Provider]:
    """A provider that runs."""
    with Provider() as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


def charge(url: str, key: str, amount: int) -> dict[str, Any]:
    """Ask the provider, as a client does."""
    request = urllib.request.Request(url, json.dumps({"amount": amount}).encode(), {"Idempotency-Key": key})
    with urllib.request.urlopen(request, timeout=20) as response:
        return json.load(response)
