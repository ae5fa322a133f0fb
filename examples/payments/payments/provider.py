"""A payment provider to try the example with: `python -m payments.provider --delay 5`, and the client's side of it.

It charges first and answers after the delay, so there is time to kill the one who waits for the answer. Like a real one
it knows the header Idempotency-Key: a second request with the same key is answered with the first one's charge.
"""

from __future__ import annotations

import argparse
import json
import os
import time
import urllib.request
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Lock
from typing import Any

URL = os.environ.get("PROVIDER_URL", "http://127.0.0.1:8099")
TIMEOUT_S = 20


def charge(amount: str, *, idempotency_key: str) -> dict[str, Any]:
    """Charge an amount, or get back the charge that was made under the same key. Raises `OSError`."""
    headers = {"Content-Type": "application/json", "Idempotency-Key": idempotency_key}
    request = urllib.request.Request(f"{URL}/charges", json.dumps({"amount": amount}).encode(), headers)  # noqa: S310 - ours
    with urllib.request.urlopen(request, timeout=TIMEOUT_S) as response:  # noqa: S310
        made: dict[str, Any] = json.load(response)
    return made


class Provider(BaseHTTPRequestHandler):
    """Charges in memory: what it knows is gone when it ends."""

    charges: dict[str, dict[str, Any]]
    delay_s: float
    lock = Lock()

    def do_POST(self) -> None:
        """Charge, once for each key."""
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        key = self.headers["Idempotency-Key"]
        with self.lock:
            known = key in self.charges
            made = self.charges.setdefault(key, {"id": f"ch_{len(self.charges) + 1}", "amount": asked["amount"]})
        print("asked again" if known else "charged", made["id"], made["amount"], key, flush=True)
        time.sleep(0 if known else self.delay_s)
        self._answer(made)

    def do_GET(self) -> None:
        """List what was charged."""
        self._answer(list(self.charges.values()))

    def _answer(self, content: object) -> None:
        body = json.dumps(content).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Say nothing more than what was charged."""


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m payments.provider")
    parser.add_argument("--delay", type=float, default=0.0, help="seconds between a charge and the answer")
    Provider.charges, Provider.delay_s = {}, parser.parse_args().delay
    host, port = URL.removeprefix("http://").split(":")
    with ThreadingHTTPServer((host, int(port)), Provider) as server:
        print("provider ready", flush=True)
        server.serve_forever()


if __name__ == "__main__":
    main()
