"""RQ, both ways, on a real Redis with real workers: a committed job has its effects once, whatever is killed and whenever."""

import os
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import redis
import rq
import sqlalchemy as sa
from rq.registry import StartedJobRegistry
from rq.serializers import JSONSerializer
from rq.timeouts import TimerDeathPenalty
from sqlalchemy.orm import Session

import outbox.rq
from outbox.errors import BrokerRefused, BrokerUnavailable, ConfigurationError
from outbox.migrations import LATEST
from outbox.migrations.sql import apply
from outbox.outgoing import Outgoing
from outbox.points import Point
from outbox.publishers.base import Published
from outbox.publishers.factory import open_publisher
from outbox.relay.service import run_relay
from outbox.routes import Routes
from outbox.rq import JobOptions
from outbox.rqjob import CONTENT_TYPE, RqJob
from outbox.settings import RelaySettings
from outbox.states import Outcome
from outbox.tables import DEFAULT
from tests.faults import processes
from tests.faults.processes import Program
from tests.faults.stopped import stopping_at, wait_until_stopped
from tests.integration import rq_jobs
from tests.integration.consuming import until
from tests.integration.test_kombu_publisher import Steer, outcomes
from tests.recorded import context_of, links_of, recording
from tests.rows import outgoing
from tests.servers.proc import free_port
from tests.servers.redis import Redis

JOBS = "tests.integration.rq_jobs"


class SimpleWorker(rq.SimpleWorker):
    """RQ's worker without a horse, and without the alarm that pytest's own time limit needs."""

    death_penalty_class = TimerDeathPenalty

    def _install_signal_handlers(self) -> None: ...


class Shop:
    """One application: its database, its Redis, and the programs that it starts."""

    def __init__(self, database_url: str, redis_url: str) -> None:
        self.database_url = database_url
        self.redis_url = redis_url
        self.broker_url = f"rq+{redis_url}"
        self.redis = redis.Redis.from_url(redis_url)
        self.engine = sa.create_engine(database_url, poolclass=sa.NullPool)
        with self.engine.begin() as connection:
            apply(connection, range(1, LATEST + 1))
            rq_jobs.effects.metadata.create_all(connection)

    def enqueue(self, func: Any, *args: Any, commit: bool = True, **options: Any) -> str:
        with Session(self.engine) as session:
            job_id = outbox.rq.enqueue(session, "work", func, *args, options=JobOptions(**options))
            session.flush()
            (session.commit if commit else session.rollback)()
            return str(job_id)

    def relay(self) -> Program:
        return processes.relay("relay", self.database_url, self.broker_url, "--lease", "5500ms", "--confirm-timeout", "500ms")

    def publish(self) -> None:
        """Let a relay publish what there is, and end."""
        stop = threading.Event()
        settings = RelaySettings(database_url=self.database_url, broker_url=self.broker_url, poll_interval_s=0.1)
        with ThreadPoolExecutor(1) as pool:
            relay = pool.submit(run_relay, settings, stop)
            try:
                until(lambda: self.left() == 0 or relay.done())
            finally:
                stop.set()
            relay.result()

    def worker(self, *options: str, queues: tuple[str, ...] = ("work",)) -> Program:
        command = ("-m", "rq.cli", "worker", "--url", self.redis_url, *options, *queues)
        return Program("worker", command, {"OUTBOX_DATABASE_URL": self.database_url}, ready="Listening on")

    def work(self, *options: str) -> str:
        """Let a worker do what there is, and return its log."""
        with self.worker("--burst", *options) as worker:
            assert worker.process.wait(60) == 0, worker.log
            return worker.log

    def work_here(self) -> None:
        """Let a worker of this process, which forks no horse, do what there is: where nothing is killed that is quicker."""
        rq_jobs.sessions.configure(bind=self.engine)
        queue = rq.Queue("work", connection=self.redis)
        SimpleWorker([queue], connection=self.redis).work(burst=True)

    def left(self) -> int:
        with self.engine.connect() as connection:
            return connection.execute(sa.select(sa.func.count()).select_from(DEFAULT.message)).scalar_one()

    def effects(self) -> list[str]:
        with self.engine.connect() as connection:
            return sorted(connection.execute(sa.select(rq_jobs.effects)).scalars())

    def charges(self) -> list[str]:
        with self.engine.connect() as connection:
            return sorted(connection.execute(sa.select(rq_jobs.charges)).scalars())

    def job(self, job_id: str, serializer: Any = None) -> rq.job.Job:
        return rq.job.Job.fetch(job_id, connection=self.redis, serializer=serializer)

    @contextmanager
    def closed_gate(self) -> Iterator[Callable[[], None]]:
        """Keep jobs in the middle, until the block ends or what it is given is called."""
        with self.engine.connect() as connection:
            connection.execute(sa.text(f"SELECT pg_advisory_xact_lock({rq_jobs.GATE})"))
            yield connection.rollback

    def waiting(self) -> int:
        """How many sessions wait for a lock: jobs at the gate, or behind another run of themselves."""
        query = "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'"
        with self.engine.connect() as connection:
            return connection.execute(sa.text(query)).scalar_one()

    def abandon(self) -> None:
        """Do what a worker does that comes by once the heartbeats of a dead one are overdue."""
        StartedJobRegistry("work", connection=self.redis).cleanup(timestamp=time.time() + 3600)

    def close(self) -> None:
        self.engine.dispose()
        self.redis.close()


@pytest.fixture
def shop(database_url: str, redis_url: str) -> Iterator[Shop]:
    shop = Shop(database_url, redis_url)
    yield shop
    shop.close()


def horse_of(worker: Program) -> int:
    """The process that is in mid-job, by what it has printed."""
    return int(re.findall(r"in mid-job (\d+)", worker.log)[-1])


def kill_and_wait(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)
    until(lambda: not Path(f"/proc/{pid}").exists() or "Z" in Path(f"/proc/{pid}/stat").read_text().split()[2])


def test_committed_jobs_run_and_those_rolled_back_do_not(shop: Shop) -> None:
    shop.enqueue(rq_jobs.ship, "a", commit=False)
    done = shop.enqueue(rq_jobs.ship, "b")
    shop.enqueue(rq_jobs.ship, "c", commit=False)
    assert shop.redis.keys() == []
    shop.publish()
    shop.work()
    assert shop.effects() == ["b"]
    assert shop.job(done).return_value() == "shipped b"


def test_a_worker_with_the_json_serializer_runs_them_too(shop: Shop) -> None:
    shop.broker_url += "?serializer=json"
    done = shop.enqueue(rq_jobs.ship, "a", meta={"why": ["x"]})
    shop.publish()
    assert b'"tests.integration.rq_jobs.ship", null, ["a"]' in shop.job(done, JSONSerializer).data
    shop.work("--serializer", "rq.serializers.JSONSerializer")
    assert shop.effects() == ["a"]
    assert shop.job(done, JSONSerializer).meta == {"why": ["x"]}


def test_a_job_whose_horse_is_killed_runs_again_and_has_its_effect_once(shop: Shop) -> None:
    shop.enqueue(rq_jobs.ship, "a")
    shop.publish()
    with shop.worker() as worker:
        with shop.closed_gate():
            until(lambda: shop.waiting() == 1)
            first = horse_of(worker)
            kill_and_wait(first)
            until(lambda: shop.waiting() == 2)  # PostgreSQL has not noticed, and the second run waits for the first
        until(lambda: "Job OK" in worker.log, worker.log)
        assert horse_of(worker) != first
    assert shop.effects() == ["a"]


def test_a_job_whose_worker_and_horse_are_killed_is_found_and_runs_again(shop: Shop) -> None:
    shop.enqueue(rq_jobs.ship, "a")
    shop.publish()
    with shop.closed_gate(), shop.worker() as worker:
        until(lambda: shop.waiting() == 1)
        worker.kill()
        kill_and_wait(horse_of(worker))
    assert shop.effects() == []
    shop.abandon()
    shop.work_here()
    assert shop.effects() == ["a"]


@pytest.mark.matrix
def test_a_second_run_waits_for_a_horse_that_has_outlived_its_worker(shop: Shop) -> None:
    shop.enqueue(rq_jobs.ship, "a")
    shop.publish()
    with shop.worker() as worker, shop.closed_gate() as open_gate:
        until(lambda: shop.waiting() == 1)
        worker.kill()
        shop.abandon()
        with shop.worker("--burst") as second:
            until(lambda: shop.waiting() == 2)
            open_gate()
            assert second.process.wait(60) == 0, second.log
            assert "in mid-job" not in second.log
    assert shop.effects() == ["a"]


def test_a_leased_job_that_is_run_again_returns_what_it_returned_and_charges_nothing(shop: Shop) -> None:
    job_id = shop.enqueue(rq_jobs.charge, "a")
    shop.publish()
    shop.work_here()
    shop.redis.flushdb()  # a Redis that has forgotten the job, and an operator who has it made again
    shop.enqueue(rq_jobs.charge, "a", job_id=job_id)
    shop.publish()
    shop.work_here()
    assert shop.job(job_id).return_value() == "charged a"
    assert len(shop.charges()) == 1


def test_a_leased_job_that_returns_a_retry_gives_the_lease_back_and_runs_again(shop: Shop, tmp_path: Path) -> None:
    shop.enqueue(rq_jobs.charge_later, "a", str(tmp_path / "mark"), retries=0)
    shop.publish()
    shop.work_here()
    assert shop.charges() == ["a"]


def test_a_job_that_repeats_is_refused_as_all_its_runs_have_one_id(shop: Shop) -> None:
    queue = rq.Queue("work", connection=shop.redis)
    job = queue.enqueue(rq_jobs.ship, "a", repeat=rq.Repeat(times=2))
    shop.work_here()
    assert "one id for all of its runs" in str(job.latest_result().exc_string)
    assert shop.effects() == []


def test_a_leased_job_whose_horse_is_killed_runs_again_with_the_same_idempotency_key(shop: Shop) -> None:
    job_id = shop.enqueue(rq_jobs.charge, "a")
    shop.publish()
    with shop.worker() as worker:
        with shop.closed_gate():
            until(lambda: shop.waiting() == 1)
            kill_and_wait(horse_of(worker))
        until(lambda: "Job OK" in worker.log, worker.log)
    assert shop.job(job_id).return_value() == "charged a"
    assert len(shop.charges()) == 2
    assert len(set(shop.charges())) == 1


@pytest.mark.matrix
def test_a_second_run_waits_for_a_leased_one_that_has_outlived_its_worker(shop: Shop) -> None:
    shop.enqueue(rq_jobs.charge, "a")
    shop.publish()
    with shop.worker() as worker, shop.closed_gate() as open_gate:
        until(lambda: shop.waiting() == 1)
        worker.kill()
        shop.abandon()
        with shop.worker("--burst") as second:
            second.wait_for_log("work: tests.integration.rq_jobs.charge")
            open_gate()
            assert second.process.wait(60) == 0, second.log
            assert "in mid-job" not in second.log
    assert len(shop.charges()) == 1


def test_a_job_published_twice_is_in_the_queue_once(shop: Shop) -> None:
    row = job_row()
    for _ in range(2):
        assert outcomes(publish(shop.broker_url, [row])) == {1: Outcome.CONFIRMED}
    assert shop.redis.lrange("rq:queue:work", 0, -1) == [str(row.message_id).encode()]


def test_a_relay_killed_before_it_settles_makes_the_job_again_and_the_effect_stays_one(shop: Shop) -> None:
    shop.enqueue(rq_jobs.ship, "a", result_ttl_s=0)  # so that Redis does not know the job any more when it comes again
    with stopping_at(Point.BEFORE_SETTLE, 1, shop.relay()) as relay:
        wait_until_stopped(relay)
        shop.work_here()
        assert (shop.effects(), shop.left()) == (["a"], 1)
        relay.kill()
    shop.publish()
    assert shop.redis.llen("rq:queue:work") == 1
    shop.work_here()
    assert (shop.effects(), shop.redis.llen("rq:queue:work")) == (["a"], 0)


def test_a_job_that_fails_is_rolled_back_and_runs_again(shop: Shop, tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    job_id = shop.enqueue(rq_jobs.fail_once, "a", str(mark), retries=1)
    shop.publish()
    shop.work_here()
    assert [result.type.name for result in shop.job(job_id).results()] == ["SUCCESSFUL"]
    assert (shop.effects(), mark.exists()) == (["a"], True)


def test_a_job_that_returns_a_retry_is_rolled_back_and_runs_again(shop: Shop, tmp_path: Path) -> None:
    shop.enqueue(rq_jobs.ask_again, "a", str(tmp_path / "mark"), retries=0)
    shop.publish()
    shop.work_here()
    assert shop.effects() == ["a"]


def test_a_function_that_another_job_calls_is_refused_and_changes_nothing(shop: Shop) -> None:
    job_id = shop.enqueue(rq_jobs.calls_another, "a", retries=0)
    shop.publish()
    shop.work_here()
    assert "ship runs as an RQ job of its own" in str(shop.job(job_id).latest_result().exc_string)
    assert shop.effects() == []
    with pytest.raises(ConfigurationError, match="runs as an RQ job of its own"):
        rq_jobs.ship("a")


def job_row(number: int = 1, key: str | None = None, queue: str = "work", **values: Any) -> Outgoing:
    payload = RqJob(queue=queue, function=f"{JOBS}.plain", args=[str(number)]).encoded()
    return outgoing(number, key, **{"content_type": CONTENT_TYPE, "payload": payload} | values)


def publish(url: str, rows: list[Outgoing], control: Any = None) -> Published:
    publisher = open_publisher(url, Routes())
    publisher.connect()
    try:
        return publisher.publish(rows, control or Steer())
    finally:
        publisher.close()


def test_what_is_no_job_is_unpublishable_and_the_others_go_on(shop: Shop) -> None:
    rows = [outgoing(1), job_row(2), job_row(3, payload=b"{")]
    published = publish(shop.broker_url, rows)
    assert outcomes(published) == {1: Outcome.UNPUBLISHABLE, 2: Outcome.CONFIRMED, 3: Outcome.UNPUBLISHABLE}
    assert "no job for RQ" in str(published.verdicts[1].reason)


def test_jobs_come_in_order_and_a_key_waits_behind_the_one_that_cannot_be_made(shop: Shop) -> None:
    rows = [job_row(1, "a"), job_row(2, "b", payload=b"{"), job_row(3, "a"), job_row(4, "b"), job_row(5)]
    control = Steer()
    found = outcomes(publish(shop.broker_url, rows, control))
    assert [found[number] for number in (2, 4)] == [Outcome.UNPUBLISHABLE, Outcome.HELD]
    ids = [job_id.decode() for job_id in shop.redis.lrange("rq:queue:work", 0, -1)]
    assert sorted(ids) == sorted(str(rows[number].message_id) for number in (0, 2, 4))
    assert ids.index(str(rows[0].message_id)) < ids.index(str(rows[2].message_id))
    assert control.progressed == 4


def test_nothing_is_sent_once_the_lease_is_over(shop: Shop) -> None:
    found = outcomes(publish(shop.broker_url, [job_row(1), job_row(2)], Steer(sends=1)))
    assert found == {1: Outcome.CONFIRMED, 2: Outcome.UNSENT}
    assert shop.redis.llen("rq:queue:work") == 1


def test_headers_travel_in_the_meta_of_the_job(shop: Shop) -> None:
    row = job_row(headers={"traceparent": "00-a-b-01"})
    publish(shop.broker_url, [row])
    assert shop.job(str(row.message_id)).meta == {"outbox-headers": {"traceparent": "00-a-b-01"}}


def test_a_queue_that_is_something_else_in_redis_costs_its_jobs_attempts_and_leaves_nothing_behind(shop: Shop) -> None:
    shop.redis.set("rq:queue:work", "not a list")
    row = job_row()
    published = publish(shop.broker_url, [row, job_row(2, queue="other")])
    assert outcomes(published) == {1: Outcome.REJECTED, 2: Outcome.CONFIRMED}
    shop.redis.delete("rq:queue:work")
    assert outcomes(publish(shop.broker_url, [row])) == {1: Outcome.CONFIRMED}
    assert shop.redis.llen("rq:queue:work") == 1


def test_while_redis_is_down_or_full_no_job_spends_an_attempt(own_redis: Redis) -> None:
    url = own_redis.create_keyspace()
    publisher = open_publisher(f"rq+{url}", Routes())
    publisher.connect()
    with redis.Redis.from_url(url) as client:
        client.config_set("maxmemory", "1")
        full = publisher.publish([job_row(1), job_row(2)], Steer())
        client.config_set("maxmemory", "0")
    assert full.lost is not None
    assert [verdict.outcome for verdict in full.verdicts.values()] == [Outcome.UNKNOWN, Outcome.UNSENT]
    publisher.connect()
    own_redis.kill()
    down = publisher.publish([job_row(1)], Steer())
    assert down.lost is not None
    assert down.verdicts[1].outcome is Outcome.UNKNOWN
    for _ in range(2):
        with pytest.raises(BrokerUnavailable):
            publisher.connect()
    own_redis.start()
    publisher.connect()
    publisher.tick()
    assert outcomes(publisher.publish([job_row(1)], Steer())) == {1: Outcome.CONFIRMED}
    own_redis.kill()
    with pytest.raises(BrokerUnavailable):
        publisher.tick()
    publisher.close()


def test_a_wrong_password_is_a_refusal(shop: Shop) -> None:
    publisher = open_publisher(re.sub(r":[0-9a-f]+@", ":wrong@", shop.broker_url), Routes())
    with pytest.raises(BrokerRefused) as caught:
        publisher.connect()
    assert "wrong@" not in str(caught.value)
    publisher.close()


@pytest.mark.parametrize("url", ["rq+amqp://h", "rq+", "rq+redis", "rq+redis://u:geheim@h:port/0", "rq+redis://[::1/0"])
def test_a_url_of_no_redis_is_refused_with_an_example_and_without_its_password(url: str) -> None:
    with pytest.raises(ConfigurationError, match=r"expected rq\+redis://user:password@host:6379/0") as caught:
        open_publisher(url, Routes())
    assert "geheim" not in str(caught.value)


def test_a_serializer_that_is_not_known_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="use one of pickle, json"):
        open_publisher("rq+redis://h/0?serializer=yaml", Routes())


def test_a_publisher_that_is_not_connected_sends_nothing() -> None:
    publisher = open_publisher(f"rq+redis://127.0.0.1:{free_port()}/0", Routes())
    publisher.tick()
    assert publisher.publish([job_row()], Steer()).verdicts[1].outcome is Outcome.UNSENT
    with pytest.raises(BrokerUnavailable):
        publisher.connect()
    publisher.close()


def test_jobs_have_spans_linked_to_where_they_were_enqueued(shop: Shop, tmp_path: Path) -> None:
    with recording() as spans:
        shop.enqueue(rq_jobs.ship, "ship")
        shop.enqueue(rq_jobs.charge, "charge")
        shop.enqueue(rq_jobs.ask_again, "again", str(tmp_path / "mark"))
        shop.publish()
        shop.work_here()
    created = spans.named("create rq.work")
    assert links_of(spans.one("send rq.work")) == [context_of(span) for span in created]
    ship, charge, asked, again = spans.named("process rq.work")
    assert [links_of(span) for span in (ship, charge, asked, again)] == [[context_of(created[place])] for place in (0, 1, 2, 2)]
    said = [(span.attributes or {}).get("outbox.result") for span in (ship, charge, asked, again)]
    assert said == ["handled", "handled", None, "handled"]
    assert {(span.attributes or {}).get("error.type") for span in (ship, charge, asked, again)} == {None}
