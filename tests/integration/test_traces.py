"""The trace of a message through a real RabbitMQ, as OpenTelemetry's SDK records it in memory."""

import asyncio
import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any

import pytest
import sqlalchemy as sa
from opentelemetry import baggage, context, propagate, trace
from opentelemetry.sdk.trace import SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor, SpanExporter
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF
from opentelemetry.trace import SpanKind, StatusCode
from sqlalchemy.ext.asyncio import AsyncSession, async_sessionmaker, create_async_engine
from sqlalchemy.orm import Session

import outbox
from outbox import Event, Inbox, Message
from outbox.routes import Route, Routes
from outbox.tracing import tracer as tracing
from outbox.wire import Format
from tests.integration.consuming import Shop, record, relaying, running, until
from tests.integration.test_rabbitmq_publisher import arrived, declare
from tests.recorded import Spans, context_of, links_of, parent_of, recording, set_up
from tests.story import ROOT
from tests.terminal import Terminal

PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331"
TOPIC = "orders.placed"


@pytest.fixture
def shop(database_url: str, vhost_url: str) -> Iterator[Shop]:
    shop = Shop(database_url, vhost_url)
    with shop.engine.begin() as connection:
        connection.execute(sa.text("INSERT INTO outbox_partition (partition) SELECT generate_series(0, 63)"))
    yield shop
    shop.close()


@pytest.fixture(autouse=True)
def _untold(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracing, "_told", set())


def enqueue(shop: Shop, *events: Event) -> None:
    with Session(shop.engine) as session, session.begin():
        outbox.enqueue_many(session, events or [Event(topic=TOPIC, payload={}, key="o-1")])


def on_its_way(shop: Shop, database_url: str, **more: Any) -> Any:
    """Publish what was enqueued; return the one message as a plain client gets it."""
    declare(shop.broker_url, "plain", exchange="outbox")
    found: list[Any] = []

    def take() -> bool:
        found.extend(arrived(shop.broker_url, "plain"))
        return bool(found)

    with relaying(database_url, shop.broker_url, **more):
        until(take)
    (message,) = found
    return message


# The way of a message


@pytest.fixture
def orders(database_url: str, vhost_url: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The modules of examples/orders, with our servers."""
    monkeypatch.setenv("OUTBOX_DATABASE_URL", database_url)
    monkeypatch.syspath_prepend(str(ROOT / "examples/orders"))
    terminal = Terminal(ROOT / "examples/orders", {"OUTBOX_DATABASE_URL": database_url, "OUTBOX_BROKER_URL": vhost_url})
    terminal.run(["alembic upgrade head"])
    yield lambda name: import_module(f"orders.{name}")
    sys.modules["orders.database"].engine.dispose()
    for name in [name for name in sys.modules if name.partition(".")[0] == "orders"]:
        del sys.modules[name]


@pytest.mark.parametrize("continues", [False, True], ids=["linked", "continued"])
def test_an_order_is_followed_from_the_request_to_the_shipment(database_url, vhost_url, orders, monkeypatch, continues):
    inbox = orders("consumer").inbox
    monkeypatch.setattr(inbox, "_continue_traces", continues)

    def post_order(spans: Spans) -> None:
        """What a web framework's instrumentation does around a handler."""
        with (
            spans.tracer.start_as_current_span("POST /orders", kind=SpanKind.SERVER),
            orders("database").sessions.begin() as session,
        ):
            orders("place").place(session, "teapot", 1)

    routes = Routes(tuple(Route(topic, queues=["fulfilment"]) for topic in ("orders.placed", "payments.taken")))
    with recording() as spans:
        with relaying(database_url, vhost_url, routes), running(inbox, vhost_url) as runner:
            post_order(spans)
            until(lambda: runner.counts["handled"] == 2)
        until(lambda: len(spans.all()) == 7, str(spans.all()))
    request, created, taking, taken, shipping = (
        spans.one(name)
        for name in (
            "POST /orders",
            "create orders.placed",
            "process orders.placed",
            "create payments.taken",
            "process payments.taken",
        )
    )
    sent = [spans.one("send orders.placed"), spans.one("send payments.taken")]

    assert [span.kind for span in (created, *sent, taking, taken, shipping)] == [
        SpanKind.PRODUCER, SpanKind.CLIENT, SpanKind.CLIENT, SpanKind.CONSUMER, SpanKind.PRODUCER, SpanKind.CONSUMER,
    ]  # fmt: skip
    assert parent_of(created) == context_of(request)
    assert links_of(sent[0]) == links_of(taking) == [context_of(created)]
    assert links_of(sent[1]) == links_of(shipping) == [context_of(taken)]
    assert parent_of(taken) == context_of(taking)
    assert (parent_of(taking), parent_of(shipping)) == ((context_of(created), context_of(taken)) if continues else (None, None))
    assert {span.status.status_code for span in (created, *sent, taking, shipping)} == {StatusCode.UNSET}


def test_spans_say_what_the_conventions_ask_for(shop, database_url):
    shop.inbox.transactional("orders.*")(record)
    shop.declare()
    with recording() as spans:
        with relaying(database_url, shop.broker_url), running(shop.inbox, shop.broker_url) as runner:
            enqueue(shop)
            until(lambda: runner.counts["handled"] == 1)
        until(lambda: len(spans.all()) == 3)
    (message_id,) = shop.effects()
    host, port = shop.broker_url.partition("@")[2].partition("/")[0].split(":")

    def said(name: str) -> dict[str, Any]:
        span = spans.one(f"{name} {TOPIC}")
        assert span.instrumentation_scope is not None
        assert (span.instrumentation_scope.name, span.instrumentation_scope.version) == ("outbox", outbox.__version__)
        assert span.instrumentation_scope.schema_url == "https://opentelemetry.io/schemas/1.44.0"
        return dict(span.attributes or {})

    shared = {"messaging.destination.name": TOPIC, "messaging.message.id": message_id}
    operation = {
        name: {"messaging.operation.name": name, "messaging.operation.type": name} for name in ("create", "send", "process")
    }
    where = {"messaging.system": "rabbitmq", "server.address": host, "server.port": int(port)}
    assert said("create") == shared | operation["create"] | {"messaging.system": "outbox"}
    assert said("send") == shared | operation["send"] | where | {"messaging.batch.message_count": 1}
    assert said("process") == shared | operation["process"] | {
        "messaging.system": "rabbitmq", "messaging.consumer.group.name": "shipping", "outbox.result": "handled",
    }  # fmt: skip
    (link,) = spans.one(f"send {TOPIC}").links
    assert dict(link.attributes or {}) == {"messaging.message.id": message_id}


# What is carried


def context_with(traceparent: str, *, state: str = "", **entries: str) -> Any:
    carrier = {"traceparent": traceparent, "tracestate": state}
    current = propagate.extract(carrier)
    for name, value in entries.items():
        current = baggage.set_baggage(name, value, current)
    return current


@contextmanager
def current(attached: Any) -> Iterator[None]:
    token = context.attach(attached)
    yield
    context.detach(token)


LONG_STATE = ",".join(f"vendor{number}={'x' * 200}" for number in range(2))


@pytest.mark.parametrize("form", list(Format))
@pytest.mark.parametrize("flags", ["00", "01"])
def test_trace_context_and_baggage_reach_any_client_as_they_were(shop, database_url, flags, form):
    with recording() as spans, current(context_with(f"{PARENT}-{flags}", state=LONG_STATE, tenant="north", who="čas")):
        enqueue(shop)
    headers = on_its_way(shop, database_url, routes=Routes(format=form, source="/shop")).headers

    trace_id, span_id = headers["traceparent"].split("-")[1:3]
    assert headers["traceparent"] == f"00-{trace_id}-{span_id}-{flags}"
    assert trace_id == "0af7651916cd43dd8448eb211c80319c"
    assert span_id != "b7ad6b7169203331"
    assert headers["tracestate"] == LONG_STATE
    assert sorted(headers["baggage"].split(",")) == ["tenant=north", "who=%C4%8Das"]
    if flags == "01":
        assert context_of(spans.one(f"create {TOPIC}")) == (int(trace_id, 16), int(span_id, 16))
    else:
        assert spans.all() == []
    with shop.engine.connect() as connection:
        assert connection.execute(sa.text("SELECT count(*) FROM outbox_message")).scalar_one() == 0


def test_a_message_that_is_not_sampled_is_handled_and_stays_so(shop, database_url):
    carried: list[Any] = []

    @shop.inbox.transactional("orders.*")
    def handle(session: Session, message: Message) -> None:
        record(session, message)
        carried.append((message.headers["traceparent"], trace.get_current_span().get_span_context()))

    shop.declare()
    with recording(sampler=ALWAYS_OFF) as spans:
        with current(context_with(f"{PARENT}-00")):
            enqueue(shop)
        with relaying(database_url, shop.broker_url), running(shop.inbox, shop.broker_url) as runner:
            until(lambda: runner.counts["handled"] == 1)
    assert spans.all() == []
    assert carried[0][0].endswith("-00")
    assert not carried[0][1].trace_flags.sampled


@pytest.mark.parametrize("more", [{}, {"tracestate": "a=b", "baggage": "c=d"}])
def test_a_context_that_the_event_has_is_not_touched_and_gets_no_create_span(shop, database_url, more):
    own = {"traceparent": f"{PARENT}-01", **more}
    with recording() as spans:
        with current(context_with("00-11111111111111111111111111111111-2222222222222222-01", tenant="north")):
            enqueue(shop, Event(topic=TOPIC, payload={}, headers=own))
        headers = on_its_way(shop, database_url).headers
        until(spans.all)
    assert headers == own | {"outbox-topic": TOPIC}
    assert spans.all() == [f"send {TOPIC}"]
    assert links_of(spans.one(f"send {TOPIC}")) == [(0x0AF7651916CD43DD8448EB211C80319C, 0xB7AD6B7169203331)]


def test_baggage_is_there_in_the_handler_and_goes_on_with_what_it_enqueues(shop, database_url):
    seen: list[Any] = []

    @shop.inbox.transactional("orders.*")
    def handle(session: Session, message: Message) -> None:
        record(session, message)
        seen.append(baggage.get_baggage("tenant"))
        with spans.tracer.start_as_current_span("INSERT"):
            pass
        outbox.enqueue(session, Event(topic="then", payload={}))

    shop.declare()
    with recording() as spans, running(shop.inbox, shop.broker_url) as runner:
        shop.publish("a", headers={"traceparent": f"{PARENT}-01", "baggage": "tenant=north"})
        until(lambda: runner.counts["handled"] == 1)
    assert seen == ["north"]
    assert parent_of(spans.one("INSERT")) == context_of(spans.one(f"process {TOPIC}"))
    headers = on_its_way(shop, database_url).headers
    assert headers["baggage"] == "tenant=north"
    assert int(headers["traceparent"].split("-")[2], 16) == context_of(spans.one("create then"))[1]


# How it ends


def test_a_duplicate_and_a_failure_are_told_from_the_first_delivery(shop):
    failing = iter([True, False])

    @shop.inbox.transactional("orders.*")
    def handle(session: Session, message: Message) -> None:
        record(session, message)
        if next(failing):
            raise LookupError("no such order")

    shop.declare()
    with recording() as spans, running(shop.inbox, shop.broker_url) as runner:
        shop.publish("a")
        until(lambda: runner.counts["handled"] == 1)
        shop.publish("a")
        until(lambda: runner.counts["duplicate"] == 1)
    failed, handled, duplicate = spans.named(f"process {TOPIC}")
    assert [(span.attributes or {}).get("outbox.result") for span in (failed, handled, duplicate)] == [
        None,
        "handled",
        "duplicate",
    ]
    assert [(span.attributes or {}).get("error.type") for span in (failed, handled, duplicate)] == ["LookupError", None, None]
    assert (failed.status.status_code, failed.status.description) == (StatusCode.ERROR, "no such order")
    assert [event.name for event in failed.events] == ["exception"]
    assert {span.status.status_code for span in (handled, duplicate)} == {StatusCode.UNSET}


def test_a_message_that_nobody_is_bound_for_is_an_error_of_its_send_span(shop, database_url):
    with recording() as spans, relaying(database_url, shop.broker_url):
        enqueue(shop)
        until(lambda: spans.named(f"send {TOPIC}"))
    span = spans.named(f"send {TOPIC}")[0]
    assert (span.attributes or {})["error.type"] == "Unroutable"
    assert (span.status.status_code, span.status.description) == (StatusCode.ERROR, "1 of 1 messages not published")


@pytest.mark.parametrize("leased", [False, True], ids=["transactional", "leased"])
def test_an_async_handler_has_its_span_too(shop, database_url, leased):
    engine = create_async_engine(database_url, poolclass=sa.NullPool)
    inbox = Inbox("shipping", sessions=async_sessionmaker(engine))
    done: list[str] = []

    async def handle(given: Any, message: Message) -> None:
        await asyncio.sleep(0)
        with spans.tracer.start_as_current_span(f"inside {message.message_id}"):
            if isinstance(given, AsyncSession):
                await given.execute(sa.text("SELECT 1"))
        done.append(message.message_id)

    (inbox.leased if leased else inbox.transactional)("orders.*")(handle)
    shop.declare(inbox)
    with recording() as spans, running(inbox, shop.broker_url, workers=3) as runner:
        shop.publish("a", "b", "c", headers={"traceparent": f"{PARENT}-01"})
        until(lambda: runner.counts["handled"] == 3)
    processed = {span.attributes["messaging.message.id"]: span for span in spans.named(f"process {TOPIC}")}
    for message_id in done:
        assert parent_of(spans.one(f"inside {message_id}")) == context_of(processed[message_id])
        assert len(links_of(processed[message_id])) == 1


# Nothing set up, and everything broken


def round_trip(shop: Shop, database_url: str, *, fails: bool = False) -> None:
    """Enqueue two events, one of which may fail at first, and see that each has its effect once."""
    failing = iter([fails, False, False])

    @shop.inbox.transactional("orders.*")
    def handle(session: Session, message: Message) -> None:
        record(session, message)
        if next(failing):
            raise LookupError

    shop.declare()
    with relaying(database_url, shop.broker_url), running(shop.inbox, shop.broker_url) as runner:
        enqueue(shop, Event(topic=TOPIC, payload=1), Event(topic=TOPIC, payload=2))
        until(lambda: runner.counts["handled"] == 2)
    assert len(shop.effects()) == 2
    assert shop.failed() == []
    with shop.engine.connect() as connection:
        assert connection.execute(sa.text("SELECT count(*) FROM outbox_message")).scalar_one() == 0


def test_without_a_provider_there_are_no_spans_and_nothing_is_added(shop, database_url):
    with set_up(None):
        round_trip(shop, database_url)
        with current(context_with(f"{PARENT}-01")):
            enqueue(shop, Event(topic=TOPIC, payload=1))
        enqueue(shop, Event(topic=TOPIC, payload=2))
    with shop.engine.connect() as connection:
        found = list(connection.execute(sa.text("SELECT headers FROM outbox_message ORDER BY id")).scalars())
    assert found == [{"traceparent": f"{PARENT}-01"}, {}]


class BrokenProcessor(SpanProcessor):
    def __init__(self, where: str) -> None:
        self.where = where

    def on_start(self, span: Any, parent_context: Any = None) -> None:
        if self.where == "start":
            raise RuntimeError("on_start is broken")

    def on_end(self, span: Any) -> None:
        if self.where == "end":
            raise RuntimeError("on_end is broken")


class BrokenExporter(SpanExporter):
    def export(self, spans: Any) -> Any:
        raise RuntimeError("export is broken")


class BrokenProvider(trace.TracerProvider):
    def get_tracer(self, *_: Any, **__: Any) -> Any:
        raise RuntimeError("get_tracer is broken")


class BrokenSpan(trace.NonRecordingSpan):
    def __init__(self) -> None:
        super().__init__(trace.SpanContext(1, 2, is_remote=False))

    def _fail(self, *_: Any, **__: Any) -> Any:
        raise RuntimeError("the span is broken")

    get_span_context = set_attribute = set_status = record_exception = end = _fail


class BrokenSpans(trace.TracerProvider):
    def get_tracer(self, *_: Any, **__: Any) -> Any:
        return type("Tracer", (trace.NoOpTracer,), {"start_span": lambda *_, **__: BrokenSpan()})()


def broken(what: str) -> Any:
    if what in ("start", "end", "export"):
        provider = TracerProvider(shutdown_on_exit=False)
        provider.add_span_processor(SimpleSpanProcessor(BrokenExporter()) if what == "export" else BrokenProcessor(what))
        return provider
    return {"provider": BrokenProvider, "spans": BrokenSpans}[what]()


@pytest.mark.parametrize("what", ["start", "end", "export", "provider", "spans"])
def test_whatever_of_tracing_is_broken_every_message_is_handled_once(shop, database_url, caplog, what):
    caplog.set_level(logging.WARNING)
    with set_up(broken(what)):
        round_trip(shop, database_url, fails=what == "spans")
    told = [record for record in caplog.records if record.getMessage() == "tracing failed; said once"]
    assert bool(told) == (what != "export")  # the SDK's own processor has caught that one
    assert len(told) == len({vars(record)["doing"] for record in told})


# Processes


def test_opentelemetry_instrument_gives_a_relay_its_spans(shop, database_url, tmp_path):
    shop.inbox.transactional("orders.*")(record)
    shop.declare()
    with recording():
        enqueue(shop)
    variables = {"OUTBOX_DATABASE_URL": database_url, "OUTBOX_BROKER_URL": shop.broker_url}
    exporters = "--traces_exporter console --metrics_exporter none --logs_exporter none"
    command = f"opentelemetry-instrument {exporters} outbox-relay run"
    with Terminal(ROOT, variables).start([command], tmp_path / "relay.log") as relay:
        until(lambda: shop.queued() == 1)
        relay.stop()
    assert f'"name": "send {TOPIC}"' in relay.output
    assert '"kind": "SpanKind.CLIENT"' in relay.output
