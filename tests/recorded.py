"""The spans of a test, kept in memory by OpenTelemetry's own SDK."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

OURS = "outbox"


class Spans:
    """What was exported so far."""

    def __init__(self, **options: Any) -> None:
        self.exporter = InMemorySpanExporter()
        self.provider = TracerProvider(shutdown_on_exit=False, **options)
        self.provider.add_span_processor(SimpleSpanProcessor(self.exporter))
        self.tracer = self.provider.get_tracer("shop")

    def named(self, *names: str) -> list[ReadableSpan]:
        """The spans of these names, in the order in which they began."""
        found = [span for span in self.exporter.get_finished_spans() if span.name in names]
        return sorted(found, key=lambda span: span.start_time or 0)

    def one(self, name: str) -> ReadableSpan:
        (span,) = self.named(name)
        return span

    def all(self) -> list[str]:
        """The names of all spans."""
        return sorted(span.name for span in self.exporter.get_finished_spans())


@contextmanager
def set_up(provider: Any) -> Iterator[None]:
    """Make a provider the global one for the block: the API lets it be set once only."""
    with mock.patch.object(trace, "_TRACER_PROVIDER", provider):
        yield


@contextmanager
def recording(**options: Any) -> Iterator[Spans]:
    spans = Spans(**options)
    with set_up(spans.provider):
        yield spans
    spans.provider.shutdown()


def context_of(span: ReadableSpan) -> tuple[int, int]:
    """The ids of a span and its trace, as a link or a parent names them."""
    assert span.context is not None
    return span.context.trace_id, span.context.span_id


def links_of(span: ReadableSpan) -> list[tuple[int, int]]:
    return [(link.context.trace_id, link.context.span_id) for link in span.links]


def parent_of(span: ReadableSpan) -> tuple[int, int] | None:
    return None if span.parent is None else (span.parent.trace_id, span.parent.span_id)
