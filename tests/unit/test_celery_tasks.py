"""Transactional and leased tasks, run in this process: what commits, what does not, and which settings are refused."""

import logging
import threading
from types import SimpleNamespace

import pytest
import sqlalchemy as sa
from celery.exceptions import Ignore, Reject, Retry
from sqlalchemy.ext.asyncio import async_sessionmaker
from sqlalchemy.orm import Session, sessionmaker

import outbox
from outbox.celery import LeasedTask, NoUnitOfWork, OutboxCelery, TransactionalTask, starting
from outbox.inbox.errors import Busy
from outbox.tables import DEFAULT
from outbox.wire import DELIVERY_HEADER
from tests.recorded import context_of, links_of, parent_of, recording

effect = sa.Table("effect", sa.MetaData(), sa.Column("what", sa.Text))


@pytest.fixture
def engine(tmp_path):
    engine = sa.create_engine(f"sqlite:///{tmp_path / 'shop.db'}")
    outbox.metadata.create_all(engine)
    effect.metadata.create_all(engine)
    yield engine
    engine.dispose()


@pytest.fixture
def app():
    return OutboxCelery("shop", broker="memory://", set_as_current=False)


@pytest.fixture
def task(engine, app):
    """Make a task of a function, on a base of this database."""

    def task(base, fun, **options):
        made = type("Base", (base,), {"abstract": True, "sessions": sessionmaker(engine)})
        return app.task(base=made, bind=True, name="shop.task", shared=False, **options)(fun)

    return task


def seen(engine, what=effect.c.what):
    with engine.connect() as connection:
        return list(connection.execute(sa.select(what)).scalars())


def run(task, *args, task_id="one"):
    """Run a task as a worker does, and return what it raises to the worker, if it does."""
    return task.apply(args, task_id=task_id)


def test_a_duplicate_is_ignored_and_has_no_effect(engine, task):
    def body(self, what):
        self.session.execute(effect.insert().values(what=what))
        return what

    made = task(TransactionalTask, body)
    assert run(made, "a").get() == "a"
    assert run(made, "a").state == "IGNORED"
    assert run(made, "b", task_id="two").get() == "b"
    assert seen(engine) == ["a", "b"]
    assert seen(engine, DEFAULT.processed.c.consumer) == ["shop.task", "shop.task"]


def test_a_task_that_fails_leaves_nothing_and_may_run_again(engine, app, task):
    def body(self, what):
        self.session.execute(effect.insert().values(what=what))
        app.send_task("shop.other")
        if what == "bad":
            raise ValueError(what)

    made = task(TransactionalTask, body)
    assert run(made, "bad").state == "FAILURE"
    assert seen(engine) == seen(engine, DEFAULT.message.c.topic) == []
    assert run(made, "good").state == "SUCCESS"
    assert seen(engine) == ["good"]
    assert seen(engine, DEFAULT.message.c.topic) == ["celery.shop.other"]


def test_ignore_commits_and_reject_rolls_back(engine, task):
    def body(self, error):
        self.session.execute(effect.insert().values(what=error))
        raise {"ignore": Ignore, "reject": Reject}[error]

    made = task(TransactionalTask, body)
    assert run(made, "reject").state == "REJECTED"
    assert run(made, "ignore").state == "IGNORED"
    assert seen(engine) == ["ignore"]


def test_a_retry_rolls_back_and_its_next_try_runs(engine, task):
    def body(self):
        self.session.execute(effect.insert().values(what=f"try {self.request.retries}"))
        if self.request.retries < 2:
            raise self.retry(countdown=0)

    assert run(task(TransactionalTask, body, max_retries=5)).state == "SUCCESS"
    assert seen(engine) == ["try 2"]


def test_called_as_a_function_it_commits_without_a_record(engine, task):
    def body(self, what):
        self.session.execute(effect.insert().values(what=what))
        return what

    made = task(TransactionalTask, body)
    assert made("a") == made("a") == "a"
    assert seen(engine) == ["a", "a"]
    assert seen(engine, DEFAULT.processed.c.message_id) == []
    with pytest.raises(outbox.NoTransaction, match=r"self\.session"):
        made.run("a")


def test_sessions_may_come_from_a_function_except_for_a_lease(engine, app):
    def body(self):
        self.session.execute(effect.insert().values(what="a"))

    options = {"bind": True, "shared": False, "sessions": lambda: Session(engine)}
    made = app.task(base=TransactionalTask, name="shop.task", **options)(body)
    assert run(made).state == "SUCCESS"
    assert seen(engine) == ["a"]
    app.task(base=LeasedTask, name="shop.leased", **options)(body)
    with pytest.raises(outbox.ConfigurationError, match="sessionmaker"):
        app.tasks["shop.leased"]()


def test_a_leased_task_keeps_its_result_and_its_key(engine, task):
    asked = []

    def body(self, what):
        asked.append((what, self.lease.idempotency_key))
        if what == "fails":
            raise ValueError(what)
        return {"charge": what}

    made = task(LeasedTask, body)
    assert run(made, "fails").state == "FAILURE"
    assert run(made, "a").get() == {"charge": "a"}
    assert run(made, "a").state == "IGNORED"
    assert [what for what, _ in asked] == ["fails", "a"]
    assert len({key for _, key in asked}) == 1
    with pytest.raises(outbox.NoTransaction, match=r"self\.lease"):
        made("a")


def worker_request(task, **options):
    """A request as a worker makes it, with what would follow the task."""
    request = {
        "id": "one",
        "called_directly": False,
        "is_eager": False,
        "retries": 0,
        "delivery_info": {"exchange": "", "routing_key": "q"},
    }
    task.push_request(**request | options)


def test_what_follows_is_enqueued_with_the_effects_and_not_left_to_celery(engine, app, task):
    made = task(TransactionalTask, lambda_named("done"))
    other = {"task": "shop.other", "args": [], "kwargs": {}, "options": {}, "subtask_type": None, "immutable": False}
    worker_request(made, chain=[other | {"task": "shop.third"}, other], callbacks=[other | {"task": "shop.linked"}])
    assert made() == "done"
    assert made.request.chain is made.request.callbacks is None
    made.pop_request()
    assert seen(engine, DEFAULT.message.c.topic) == ["celery.shop.linked", "celery.shop.other"]
    [linked, chained] = [each[DELIVERY_HEADER]["headers"] for each in seen(engine, DEFAULT.message.c.headers)]
    assert linked["parent_id"] == chained["parent_id"] == "one"
    assert b"shop.third" in seen(engine, DEFAULT.message.c.payload)[1]


def lambda_named(value):
    def body(self):
        return value

    return body


def test_a_task_that_is_held_elsewhere_is_called_again_and_counts_no_retry(engine, app, task, monkeypatch):
    def body(self):
        raise Busy("another worker holds the message", retry_after_s=60)

    made, sent = task(TransactionalTask, body), []
    monkeypatch.setattr(type(app), "send_task", lambda *_, **options: sent.append(options))
    worker_request(made, retries=2)
    with pytest.raises(Retry):
        made()
    made.pop_request()
    [options] = sent
    assert (options["task_id"], options["retries"], options["queue"]) == ("one", 2, "q")
    assert 1 <= options["countdown"] <= 5


def test_what_cannot_be_called_again_goes_back_to_the_broker(app, task, monkeypatch):
    def body(self):
        raise Busy("another worker holds the message")

    def away(*args, **options):
        raise ConnectionError("broker")

    made = task(TransactionalTask, body)
    monkeypatch.setattr(type(app), "send_task", away)
    worker_request(made)
    with pytest.raises(Reject) as raised:
        made()
    assert raised.value.requeue
    with pytest.raises(Reject) as raised:
        made.retry(countdown=1)
    assert raised.value.requeue
    made.pop_request()


def test_the_body_of_a_plain_task_needs_a_unit_of_work_and_what_the_worker_publishes_does_not(app, monkeypatch):
    @app.task(name="shop.plain", shared=False)
    def plain():
        app.send_task("shop.other")

    worker_request(plain)
    with pytest.raises(NoUnitOfWork):
        plain()
    plain.pop_request()
    with pytest.raises(NoUnitOfWork):
        app.send_task("shop.other")
    app.in_worker = True
    app.send_task("shop.other")


@pytest.mark.parametrize("setting", ["acks_late", "reject_on_worker_lost"])
def test_settings_that_lose_work_are_refused_with_the_line_to_write(app, task, setting):
    task(TransactionalTask, lambda_named(1), **{setting: False})
    with pytest.raises(outbox.ConfigurationError, match=rf"@app.task\(base=..., {setting}=True\)"):
        app.finalize()


def test_annotations_that_lose_work_are_refused(app, task):
    app.conf.task_annotations = {"*": {"acks_late": False}}
    task(LeasedTask, lambda_named(1))
    with pytest.raises(outbox.ConfigurationError, match="acks_late"):
        app.finalize()


@pytest.mark.parametrize("base", [TransactionalTask, LeasedTask])
def test_a_task_without_usable_sessions_is_refused(app, base):
    app.task(base=base, name="shop.task", shared=False)(lambda_named(1))
    with pytest.raises(outbox.ConfigurationError, match="sessions = sessionmaker"):
        app.finalize()
    other = OutboxCelery("shop", set_as_current=False)
    other.task(base=base, name="shop.task", shared=False, sessions=async_sessionmaker())(lambda_named(1))
    with pytest.raises(outbox.ConfigurationError, match="plain sessionmaker"):
        other.finalize()


def test_a_worker_that_starts_gives_advice_about_prefetching(app, task, caplog):
    task(TransactionalTask, lambda_named(1))
    app.finalize()
    starting._on_worker_init(SimpleNamespace(app=app))
    assert "worker_prefetch_multiplier = 1" in caplog.text
    caplog.clear()
    app.conf.worker_prefetch_multiplier = 1
    with caplog.at_level(logging.WARNING):
        starting._on_worker_init(SimpleNamespace(app=app))
    assert caplog.text == ""


def test_a_worker_inside_another_program_does_not_open_the_way_to_the_broker(app, task):
    app.finalize()
    thread = threading.Thread(target=starting._on_worker_init, args=(SimpleNamespace(app=app),))
    thread.start()
    thread.join()
    assert not app.in_worker
    starting._on_worker_init(SimpleNamespace(app=app))
    assert app.in_worker


def test_a_task_has_a_span_linked_to_the_call_and_its_own_calls_are_in_it(engine, app, task):
    def body(self, what):
        if what == "bad":
            raise LookupError(what)
        if what == "again":
            raise self.retry(countdown=0, args=["good"])
        app.send_task("shop.other")

    made = task(TransactionalTask, body, max_retries=1)
    parent = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    with recording() as spans:
        for what, task_id in (("good", "one"), ("good", "one"), ("bad", "two"), ("again", "three")):
            made.apply([what], task_id=task_id, headers={"traceparent": parent})
    processed = spans.named("process celery.shop.task")
    said = [((span.attributes or {}).get("outbox.result"), (span.attributes or {}).get("error.type")) for span in processed]
    assert said == [("handled", None), ("duplicate", None), (None, "LookupError"), (None, None), ("handled", None)]
    assert parent_of(spans.named("create celery.shop.other")[0]) == context_of(processed[0])
    assert links_of(processed[0]) == [(0x0AF7651916CD43DD8448EB211C80319C, 0xB7AD6B7169203331)]
