"""Carries the trace in which an event was enqueued along in its headers, for applications that use OpenTelemetry."""

from __future__ import annotations

import sys
from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

    from outbox.headers import HeaderValue

TRACE_HEADERS = ("traceparent", "tracestate", "baggage")
"""The names that W3C Trace Context and W3C Baggage give to what is carried."""


def traced(headers: Mapping[str, HeaderValue]) -> dict[str, HeaderValue]:
    """Return the headers, with the current trace context added unless the caller gave a `traceparent`.

    Nothing is imported and nothing added when the application has not loaded OpenTelemetry itself.
    """
    if "opentelemetry" not in sys.modules or "traceparent" in headers:
        return dict(headers)
    try:
        propagate = import_module("opentelemetry.propagate")
    except ImportError:
        return dict(headers)
    carrier: dict[str, str] = {}
    propagate.inject(carrier)
    return {name: carrier[name] for name in TRACE_HEADERS if name in carrier} | dict(headers)
