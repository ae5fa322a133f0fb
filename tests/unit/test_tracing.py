"""Spans and what is carried of them, without a broker."""

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import sqlalchemy as sa
from opentelemetry import context, propagate
from opentelemetry.trace import StatusCode
from sqlalchemy.orm import sessionmaker

import outbox
from outbox import Event, Inbox, Message
from outbox.delivery import Delivery
from outbox.publishers.base import Steady
from outbox.publishers.memory import MemoryPublisher
from outbox.publishers.wire_message import headers as wire_headers
from outbox.states import Outcome, Verdict
from outbox.tracing import tracer as tracing
from outbox.tracing.sending import LINKS_AT_MOST, sending
from outbox.tracing.server import server_of
from tests.recorded import context_of, links_of, parent_of, recording, set_up
from tests.rows import outgoing

PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331"
TOPIC = "orders.placed"
CONTEXT = (0x0AF7651916CD43DD8448EB211C80319C, 0xB7AD6B7169203331)


@pytest.fixture(autouse=True)
def _untold(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracing, "_told", set())


@pytest.fixture
def engine() -> Iterator[sa.Engine]:
    engine = sa.create_engine("sqlite://", poolclass=sa.StaticPool)
    outbox.metadata.create_all(engine)
    yield engine
    engine.dispose()


def enqueued(engine: sa.Engine, event: Event | None = None) -> dict[str, Any]:
    """Enqueue an event, and return the headers of its row."""
    with engine.begin() as connection:
        outbox.enqueue(connection, event or Event(topic=TOPIC, payload={}))
        text = connection.scalar(sa.text("SELECT headers FROM outbox_message ORDER BY id DESC LIMIT 1"))
    found: dict[str, Any] = json.loads(text)
    return found


@contextmanager
def current(traceparent: str, **more: Any) -> Iterator[None]:
    attached = propagate.extract({"traceparent": traceparent})
    for name, value in more.items():
        attached = context.set_value(name, value, attached)
    token = context.attach(attached)
    yield
    context.detach(token)


@contextmanager
def propagating(inject: Any) -> Iterator[None]:
    """Make what calls `inject` the propagator of the application."""
    before = propagate.get_global_textmap()
    propagate.set_global_textmap(type("Propagator", (), {"inject": staticmethod(inject), "fields": set()})())
    yield
    propagate.set_global_textmap(before)


# What is carried


def test_a_create_span_is_what_the_message_carries(engine):
    event = Event(topic=TOPIC, payload={}, headers={"a": 1})
    with recording() as spans:
        headers = enqueued(engine, event)
    trace_id, span_id = context_of(spans.one(f"create {TOPIC}"))
    flags = int(headers.pop("traceparent").removeprefix(f"00-{trace_id:032x}-{span_id:016x}-"), 16)
    assert (headers, flags & 1) == ({"a": 1}, 1)
    assert event.headers == {"a": 1}


def test_a_context_that_the_event_has_is_left_alone(engine):
    own = Event(topic=TOPIC, payload=1, headers={"traceparent": "00-8-9-01"})
    with recording() as spans:
        assert enqueued(engine, own) == {"traceparent": "00-8-9-01"}
    assert spans.all() == []


def test_without_a_provider_what_is_current_is_carried_and_else_nothing(engine):
    with set_up(None):
        assert enqueued(engine) == {}
        with current(f"{PARENT}-00"):
            assert enqueued(engine) == {"traceparent": f"{PARENT}-00"}


def test_a_suppressed_instrumentation_makes_no_span_and_carries_what_is_current(engine):
    with recording() as spans, current(f"{PARENT}-01", suppress_instrumentation=True):
        assert enqueued(engine) == {"traceparent": f"{PARENT}-01"}
    assert spans.all() == []


def test_each_of_many_events_has_a_span_of_its_own(engine):
    with recording() as spans, engine.begin() as connection:
        outbox.enqueue_many(connection, [Event(topic=f"t.{number}", payload={}) for number in range(3)])
    assert spans.all() == ["create t.0", "create t.1", "create t.2"]


@pytest.mark.parametrize("value", [b"bytes", "nul\0", "č", None, 7, "", "x" * 20_000])
def test_what_no_header_can_hold_is_not_carried(engine, value):
    with set_up(None), propagating(lambda carrier, *_, **__: carrier.update(traceparent=value, tracestate="a=b", baggage="c=d")):
        assert enqueued(engine) == {"baggage": "c=d"}


def test_a_propagator_that_raises_does_not_keep_an_event_from_being_enqueued(engine, caplog):
    def fail(*_: Any, **__: Any) -> None:
        raise RuntimeError("inject is broken")

    with recording() as spans, propagating(fail):
        assert enqueued(engine) == enqueued(engine) == {}
    assert spans.all() == [f"create {TOPIC}"] * 2
    assert [record.getMessage() for record in caplog.records] == ["tracing failed; said once"]


def test_a_message_of_another_library_carries_the_trace_unless_it_has_one(engine):
    def sent(**headers: Any) -> dict[str, Any]:
        delivery = Delivery(exchange="", routing_key="celery", headers={"task": "add", **headers})
        return wire_headers(outgoing(headers=enqueued(engine, Event(topic="celery.add", payload={}, delivery=delivery))))

    with recording() as spans:
        made = sent()
        theirs = sent(traceparent=f"{PARENT}-01")
    span_id = context_of(spans.one("create celery.add"))[1]
    assert made.pop("traceparent").split("-")[2] == f"{span_id:016x}"
    assert made == {"task": "add"}
    assert theirs == {"task": "add", "traceparent": f"{PARENT}-01"}


NOWHERE = """
import sys
class Nowhere:
    def find_spec(self, name, *_):
        if name.partition(".")[0] == "opentelemetry":
            raise ModuleNotFoundError(name)
sys.meta_path.insert(0, Nowhere())
import sqlalchemy as sa, outbox
from outbox.testing import drain
from sqlalchemy.orm import sessionmaker
engine = sa.create_engine("sqlite://", poolclass=sa.StaticPool)
outbox.metadata.create_all(engine)
inbox = outbox.Inbox("shipping", sessions=sessionmaker(engine), continue_traces=True)
seen = []
inbox.transactional("a")(lambda session, message: seen.append(dict(message.headers)))
with engine.begin() as connection:
    outbox.enqueue(connection, outbox.Event(topic="a", payload=1))
drain(engine, to=inbox)
engine.dispose()
print(seen, [name for name in sys.modules if "opentelemetry" in name])
"""


def test_everything_works_where_opentelemetry_is_not_installed():
    run = subprocess.run([sys.executable, "-W", "error", "-c", NOWHERE], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "[{'outbox-topic': 'a'}] []"


# One delivery


@pytest.mark.parametrize("odd", ["", "nonsense", PARENT, b"\xff", 7, "00-" + "0" * 32 + "-b7ad6b7169203331-01", "x" * 10_000])
def test_a_traceparent_that_is_none_leads_to_no_link_and_no_error(engine, caplog, odd):
    with recording() as spans:
        inbox_of(engine, continue_traces=True).process(message({"traceparent": odd, "tracestate": "%%%", "baggage": "=;,,"}))
    span = spans.one(f"process {TOPIC}")
    assert (links_of(span), parent_of(span)) == ([], None)
    assert "tracing failed" not in caplog.text


@pytest.mark.parametrize("continues", [False, True])
def test_within_another_span_a_delivery_is_its_child_and_linked(engine, continues):
    with recording() as spans, spans.tracer.start_as_current_span("poll"):
        inbox_of(engine, continue_traces=continues).process(message({"traceparent": f"{PARENT}-01".encode()}))
    span = spans.one(f"process {TOPIC}")
    assert parent_of(span) == context_of(spans.one("poll"))
    assert links_of(span) == [CONTEXT]


def inbox_of(engine: sa.Engine, **options: Any) -> Inbox:
    inbox = Inbox("shipping", sessions=sessionmaker(engine), **options)
    inbox.transactional(TOPIC)(lambda _session, _message: None)
    return inbox


def message(headers: dict[str, Any]) -> Message:
    return Message(message_id="m-1", topic=TOPIC, payload=b"{}", headers=headers)


# Batches


def test_a_large_batch_has_a_link_for_every_message():
    rows = [
        outgoing(number, topic=f"t.{number % 2}", headers={"traceparent": f"00-{number:032x}-{number:016x}-00"})
        for number in range(1, 2 * LINKS_AT_MOST + 2)
    ]
    with recording() as spans, sending(rows, server_of("amqp://u:p@mq.example/")) as sent:
        published = MemoryPublisher().publish(rows, Steady())
        sent.verdicts = published.verdicts
    found = spans.named("send", "send t.1")
    assert [(span.attributes or {})["messaging.batch.message_count"] for span in found] == [LINKS_AT_MOST, LINKS_AT_MOST, 1]
    assert [link for span in found for link in links_of(span)] == [(row.id, row.id) for row in rows]
    topics = [(link.attributes or {}).get("messaging.destination.name") for link in found[0].links]
    assert topics == [row.topic for row in rows[:LINKS_AT_MOST]]
    assert {span.status.status_code for span in found} == {StatusCode.UNSET}
    assert (found[0].attributes or {})["server.port"] == 5672


def test_a_batch_that_fails_in_several_ways_says_so():
    rows = [outgoing(number) for number in range(1, 5)]
    outcomes = [
        (Outcome.CONFIRMED, None),
        (Outcome.REJECTED, "Unroutable"),
        (Outcome.UNPUBLISHABLE, "CannotSerialize"),
        (Outcome.HELD, None),
    ]
    with recording() as spans:
        with sending(rows, server_of("memory://")) as sent:
            sent.verdicts = {
                row.id: Verdict(outcome, error_class=kind) for row, (outcome, kind) in zip(rows, outcomes, strict=True)
            }
        with pytest.raises(RuntimeError), sending(rows[:1], server_of("memory://")):
            raise RuntimeError
        with sending([], server_of("memory://")):
            pass
    mixed, raised = spans.named(f"send {TOPIC}")
    assert (mixed.attributes or {})["error.type"] == "_OTHER"
    assert mixed.status.description == "3 of 4 messages not published"
    assert (raised.attributes or {})["error.type"] == "RuntimeError"


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("amqp://u:secret@mq.example:5673/shop", ("rabbitmq", "mq.example", 5673)),
        ("amqps://mq.example//", ("rabbitmq", "mq.example", 5671)),
        ("amqp://a;amqp://b", ("rabbitmq", None, None)),
        ("rediss://:pw@cache/0", ("redis", "cache", 6379)),
        ("sentinel://a:1;sentinel://b:1", ("redis", None, None)),
        ("confluentkafka://k:9092", ("kafka", None, None)),
        ("sqla+sqlite:///x.db", ("sqla", None, None)),
        ("rq+redis://r/0", ("rq", None, None)),
        ("amqp://[bad/", ("rabbitmq", None, None)),
        ("amqp://h:port/", ("rabbitmq", None, None)),
        ("", ("rabbitmq", None, None)),
    ],
)
def test_the_server_is_told_from_the_url(url, expected):
    server = server_of(url)
    assert (server.system, server.address, server.port) == expected
