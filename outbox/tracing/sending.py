"""The spans of a batch on its way to the broker."""

from __future__ import annotations

from collections import Counter
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from outbox.states import Outcome
from outbox.tracing import names
from outbox.tracing.tracer import Harmless, api, remote, tracer

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from outbox.outgoing import Outgoing
    from outbox.states import Verdict
    from outbox.tracing.server import Server

LINKS_AT_MOST = 128
"""How many messages one span is for: SDKs keep no more links of a span by default, and drop the others without a word."""

_NOT_FAILED = (Outcome.CONFIRMED, Outcome.HELD, Outcome.UNSENT)


@dataclass(slots=True)
class Sent:
    """What became of a batch; to be filled in when it is known."""

    verdicts: Mapping[int, Verdict] = field(default_factory=dict)
    lost: BaseException | None = None


@contextmanager
def sending(rows: Sequence[Outgoing], server: Server) -> Iterator[Sent]:
    """Have spans over the publish of a batch, each linked to the contexts in which its messages were created.

    One for 128 messages, all from the begin to the end of the publish, the first of them current meanwhile. Without a
    tracer provider it does nothing.
    """
    sent, spans = Sent(), list[_Send]()
    with Harmless("making send spans"):
        spans.extend(_started(rows, server))
    if not spans:
        yield sent
        return
    token = spans[0].attach()
    try:
        yield sent
    except BaseException as error:
        sent.lost = error
        raise
    finally:
        spans[0].detach(token)
        for span in spans:
            with Harmless("ending send spans"):
                span.end(sent)


class _Send:
    def __init__(self, span: Any, rows: Sequence[Outgoing]) -> None:
        self._span = span
        self._rows = rows

    def attach(self) -> Any | None:
        with Harmless("making a span current"):
            from opentelemetry import context
            from opentelemetry.trace import set_span_in_context

            return context.attach(set_span_in_context(self._span))
        return None

    def detach(self, token: Any | None) -> None:
        if token is not None:
            with Harmless("making a span current"):
                from opentelemetry import context

                context.detach(token)

    def end(self, sent: Sent) -> None:
        try:
            self._judge(sent)
        finally:
            self._span.end()

    def _judge(self, sent: Sent) -> None:
        verdicts = [verdict for row in self._rows if (verdict := sent.verdicts.get(row.id)) is not None]
        failed = Counter(
            verdict.error_class or verdict.outcome.value for verdict in verdicts if verdict.outcome not in _NOT_FAILED
        )
        missing = len(self._rows) - sum(verdict.outcome is Outcome.CONFIRMED for verdict in verdicts)
        if sent.lost is not None and missing:
            failed = Counter([type(sent.lost).__name__])
        if failed:
            from opentelemetry.trace import Status, StatusCode

            self._span.set_attribute(names.ERROR_TYPE, next(iter(failed)) if len(failed) == 1 else names.OTHER_ERROR)
            self._span.set_status(Status(StatusCode.ERROR, f"{missing} of {len(self._rows)} messages not published"))


def _started(rows: Sequence[Outgoing], server: Server) -> Iterator[_Send]:
    with_spans = tracer() if rows else None
    if with_spans is None:
        return
    for first in range(0, len(rows), LINKS_AT_MOST):
        some = rows[first : first + LINKS_AT_MOST]
        yield _Send(_start(with_spans, some, server), some)


def _start(with_spans: Any, rows: Sequence[Outgoing], server: Server) -> Any:
    from opentelemetry.trace import SpanKind

    topics = {row.topic for row in rows}
    shared = {names.DESTINATION: rows[0].topic} if len(topics) == 1 else {}
    if len(rows) == 1:
        shared[names.MESSAGE_ID] = str(rows[0].message_id)
    attributes = {
        names.OPERATION_NAME: names.SEND,
        names.OPERATION_TYPE: names.SEND,
        names.BATCH_COUNT: len(rows),
        **server.attributes,
        **shared,
    }
    name = f"{names.SEND} {rows[0].topic}" if len(topics) == 1 else names.SEND
    links = [link for row in rows if (link := _link(row, own_topic=len(topics) > 1)) is not None]
    return with_spans.start_span(name, kind=SpanKind.CLIENT, attributes=attributes, links=links)


def _link(row: Outgoing, *, own_topic: bool) -> Any | None:
    from opentelemetry.trace import Link

    context = remote(api(), row.headers or {}) or (remote(api(), row.delivery.headers) if row.delivery is not None else None)
    if context is None:
        return None
    return Link(context, {names.MESSAGE_ID: str(row.message_id)} | ({names.DESTINATION: row.topic} if own_topic else {}))
