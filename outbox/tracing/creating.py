"""Gives an event the trace in which it was enqueued, in its headers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from outbox.tracing import names
from outbox.tracing.tracer import Harmless, api, tracer
from outbox.wire import TRACE_HEADERS

if TYPE_CHECKING:
    from collections.abc import Mapping
    from uuid import UUID

    from outbox.headers import HeaderValue

_LONGEST = 16 * 1024  # of what is carried in all, so that it never is what makes the headers too large for a broker


def traced(headers: Mapping[str, HeaderValue], *, topic: str, message_id: UUID | str) -> dict[str, HeaderValue]:
    """Return the headers, with a trace context added unless the caller gave a `traceparent`.

    It is that of a new span, `create`, or without a tracer provider the current one. Nothing is imported and nothing added when
    the application has not loaded OpenTelemetry itself. What goes along is what the application's propagators give, of the W3C's.
    """
    if api() is None or "traceparent" in headers:
        return dict(headers)
    context = None
    with Harmless("making a create span"):
        context = _created(topic, message_id)
    with Harmless("carrying a trace along"):
        return {**_carried(context), **headers}
    return dict(headers)


def _created(topic: str, message_id: UUID | str) -> Any | None:
    """Make a span, and return the context with it; None where there is no tracer."""
    with_spans = tracer()
    if with_spans is None:
        return None
    from opentelemetry.trace import SpanKind, set_span_in_context

    attributes = {
        names.OPERATION_NAME: names.CREATE,
        names.OPERATION_TYPE: names.CREATE,
        names.SYSTEM: names.OUTBOX,
        names.DESTINATION: topic,
        names.MESSAGE_ID: str(message_id),
    }
    span = with_spans.start_span(f"{names.CREATE} {topic}", kind=SpanKind.PRODUCER, attributes=attributes)
    context = set_span_in_context(span)
    with Harmless("ending a create span"):
        span.end()
    return context


def _carried(context: Any | None) -> dict[str, HeaderValue]:
    from opentelemetry import propagate

    carrier: dict[str, str] = {}
    propagate.inject(carrier, context=context)
    found: dict[str, HeaderValue] = {}
    left = _LONGEST
    for name in TRACE_HEADERS:
        value = carrier.get(name)
        if isinstance(value, str) and value and value.isascii() and value.isprintable() and len(value) <= left:
            found[name] = value
            left -= len(value)
    return found if "traceparent" in found else {name: found[name] for name in found if name == "baggage"}
