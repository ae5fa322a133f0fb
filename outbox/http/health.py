"""The health of a relay or consumer over HTTP: /livez, /readyz and /startupz; and its /metrics."""

from __future__ import annotations

import json
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from http import HTTPStatus
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qs, urlsplit

from outbox.http.readiness import Readiness
from outbox.http.server import Reply, listening

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from outbox.vitals import Vitals

JSON = "application/json"
TEXT = "text/plain; charset=utf-8"


@contextmanager
def answering(
    address: tuple[str, int] | None,
    vitals: Vitals,
    *,
    check: Callable[[], None] | None = None,
    metrics: Callable[[str], Reply] | None = None,
) -> Iterator[tuple[str, int] | None]:
    """Answer for a process at `address` while the block runs (None: nowhere); give the real address, port 0 resolved.

    `check` raises what keeps the process from being ready; it runs in a thread of its own, at most about once a second.
    `metrics` answers /metrics, given the header Accept. Raises `ConfigurationError` when the address cannot be listened on.
    """
    if address is None:
        yield None
        return
    with listening("health", address, Health(vitals, check=check, metrics=metrics).answer) as real:
        yield real


class Health:
    """Judges a process by its vitals.

    `/livez`: 503 when its loop, or a task with a limit of its own, does not get on; restart it then. An outage of a server
    is no hang, and nothing is asked of a server here. `/readyz`: 503 when `check` fails or gives no answer within two seconds;
    what is merely in trouble, like a broker that is away, is `degraded` with 200. `/startupz`: 200 after the first success.
    """

    def __init__(
        self, vitals: Vitals, *, check: Callable[[], None] | None = None, metrics: Callable[[str], Reply] | None = None
    ) -> None:
        self._metrics = metrics
        self._vitals = vitals
        self._readiness = Readiness(check or (lambda: None))
        self._endpoints = {"/livez": self._live, "/readyz": self._ready, "/startupz": self._started}

    def answer(self, target: str, accept: str) -> Reply | None:
        """Return the reply to a request's target, such as `/livez?json`; None for one that is unknown."""
        where = urlsplit(target)
        if where.path == "/metrics" and self._metrics is not None:
            return self._metrics(accept)
        endpoint = self._endpoints.get(where.path)
        if endpoint is None:
            return None
        well, found = endpoint()
        status = HTTPStatus.OK if well else HTTPStatus.SERVICE_UNAVAILABLE
        if JSON in accept or "json" in parse_qs(where.query, keep_blank_values=True):
            return Reply(status, JSON, json.dumps(found) + "\n")
        return Reply(status, TEXT, f"{found['status']}: {found['detail']}\n" if found.get("detail") else f"{found['status']}\n")

    def _live(self) -> tuple[bool, dict[str, Any]]:
        hang = self._vitals.hung()
        if hang is None:
            progress = self._vitals.progress
            return True, {"status": "alive", "doing": progress.doing, "age_s": round(progress.age_s, 3)}
        since = (datetime.now(UTC) - timedelta(seconds=hang.for_s)).isoformat(timespec="seconds")
        found = {"status": "hung", "detail": f"{hang}, since {since}", "doing": hang.doing, "since": since}
        return False, {**found, "for_s": round(hang.for_s, 3), "limit_s": hang.limit_s}

    def _ready(self) -> tuple[bool, dict[str, Any]]:
        if problem := self._readiness.problem():
            return False, {"status": "not ready", "detail": problem}
        troubles = self._vitals.troubles
        if troubles:
            said = ", ".join(f"{part} {what}" for part, what in sorted(troubles.items()))
            return True, {"status": "degraded", "detail": said, **troubles}
        return True, {"status": "ready"}

    def _started(self) -> tuple[bool, dict[str, Any]]:
        if self._vitals.started.is_set():
            return True, {"status": "started"}
        return False, {"status": "starting", "detail": "nothing has succeeded yet"}
