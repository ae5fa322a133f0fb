"""What /metrics is answered with."""

from __future__ import annotations

from http import HTTPStatus
from typing import TYPE_CHECKING

from outbox.http.server import Reply

if TYPE_CHECKING:
    from collections.abc import Callable

    from prometheus_client import CollectorRegistry

MISSING = "metrics need prometheus-client, which is not installed: pip install 'outbox-relay[metrics]'"


def missing(_accept: str) -> Reply:
    """Say what to install."""
    return Reply(HTTPStatus.NOT_IMPLEMENTED, "text/plain; charset=utf-8", f"{MISSING}\n")


def exposing(registry: CollectorRegistry) -> Callable[[str], Reply]:
    """Return what writes a registry down, in the form that the header Accept asks for: Prometheus's text or OpenMetrics."""
    from prometheus_client.exposition import choose_encoder

    def expose(accept: str) -> Reply:
        try:
            encode, content_type = choose_encoder(accept)
        except (TypeError, ValueError):  # of a client that writes anything as a version
            encode, content_type = choose_encoder("")
        return Reply(HTTPStatus.OK, content_type, encode(registry).decode())

    return expose
