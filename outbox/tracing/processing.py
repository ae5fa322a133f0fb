"""The span of one delivery: from before its transaction until after the COMMIT, with the handler inside."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from outbox.tracing import names
from outbox.tracing.tracer import Harmless, api, carrier, remote, tracer

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping


class Delivery:
    """The span of one delivery; one that has none does nothing."""

    def __init__(self, span: Any | None = None, context: Any = None) -> None:
        self._span = span
        self._context = context
        self._token: Any | None = None

    def came_to(self, result: str) -> None:
        """Say what the delivery came to: `handled`, or `duplicate`."""
        if self._span is not None:
            with Harmless("saying what a delivery came to"):
                self._span.set_attribute(names.RESULT, result)

    def begin(self) -> None:
        """Make the span the current one."""
        if self._span is not None:
            with Harmless("making a span current"):
                from opentelemetry import context

                self._token = context.attach(self._context)

    def failed(self, error: BaseException) -> None:
        """Note that it ended with an error."""
        if self._span is not None:
            with Harmless("noting an error"):
                from opentelemetry.trace import Status, StatusCode

                self._span.record_exception(error)
                self._span.set_attribute(names.ERROR_TYPE, _type_of(error))
                self._span.set_status(Status(StatusCode.ERROR, str(error)))

    def end(self) -> None:
        """End the span."""
        if self._span is not None:
            with Harmless("making a span current"):
                if self._token is not None:
                    from opentelemetry import context

                    context.detach(self._token)
            with Harmless("ending a process span"):
                self._span.end()


@contextmanager
def processing(
    headers: Mapping[str, Any],
    *,
    topic: str,
    message_id: str,
    consumer: str,
    system: str = names.RABBITMQ,
    continues: bool = False,
    no_failures: tuple[type[BaseException], ...] = (),
) -> Iterator[Delivery]:
    """Have a span over the handling of one message, current meanwhile, with the baggage that came with the message.

    It is linked to the context in which the message was created, and a root of its own, or a child of what is current. With
    `continues` it is a child of that context too, where nothing is current. What is raised is noted, apart from
    `no_failures`. Without a tracer provider it does nothing.
    """
    delivery = Delivery()
    with Harmless("making a process span"):
        delivery = _started(headers, topic, message_id, consumer, system, continues=continues) or delivery
    delivery.begin()
    try:
        yield delivery
    except BaseException as error:
        if not isinstance(error, no_failures):
            delivery.failed(error)
        raise
    finally:
        delivery.end()


def _started(
    headers: Mapping[str, Any], topic: str, message_id: str, consumer: str, system: str, *, continues: bool
) -> Delivery | None:
    with_spans = tracer()
    if with_spans is None:
        return None
    from opentelemetry.baggage.propagation import W3CBaggagePropagator
    from opentelemetry.trace import Link, NonRecordingSpan, SpanKind, get_current_span, set_span_in_context

    created = remote(api(), headers)
    context = W3CBaggagePropagator().extract(carrier(headers))
    within = context
    if continues and created is not None and not get_current_span().get_span_context().is_valid:
        within = set_span_in_context(NonRecordingSpan(created), context)
    span = with_spans.start_span(
        f"{names.PROCESS} {topic}",
        within,
        kind=SpanKind.CONSUMER,
        links=[] if created is None else [Link(created)],
        attributes={
            names.OPERATION_NAME: names.PROCESS,
            names.OPERATION_TYPE: names.PROCESS,
            names.SYSTEM: system,
            names.DESTINATION: topic,
            names.MESSAGE_ID: message_id,
            names.CONSUMER_GROUP: consumer,
        },
    )
    return Delivery(span, set_span_in_context(span, context))


def _type_of(error: BaseException) -> str:
    kind = type(error)
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
