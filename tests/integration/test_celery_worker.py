"""Transactional tasks in real workers, judged by their effects: once, whatever is delivered twice and whoever is killed."""

import json
import os
import signal
from contextlib import contextmanager

import pytest
import sqlalchemy as sa
from celery import chain
from sqlalchemy.orm import sessionmaker

from outbox.celery import OutboxCelery, unit_of_work
from outbox.migrations import LATEST
from outbox.migrations.sql import apply
from tests import celery_shop
from tests.celery_shop import configured, effect
from tests.faults import processes
from tests.integration.consuming import until

# By default a worker looks every 100 s only, by kombu's 10 times 10 s, for what has been acknowledged by nobody for an hour.
REDIS = {"visibility_timeout": 3, "unacked_restore_interval": 1, "unacked_restore_throttle": 1}


class Shop:
    """An application: its database, its broker, and a way to start workers and a relay."""

    def __init__(self, database_url, broker_url, gate, **transport):
        self.broker_url, self.gate = broker_url, gate
        self.engine = sa.create_engine(database_url)
        self.sessions = sessionmaker(self.engine)
        self.app = configured(OutboxCelery, broker_url, None)
        self._database_url = database_url
        self._environment = {
            "OUTBOX_DATABASE_URL": database_url,
            "OUTBOX_BROKER_URL": broker_url,
            "GATE": str(gate),
            "TRANSPORT": json.dumps(transport),
        }
        with self.engine.begin() as connection:
            apply(connection, range(1, LATEST + 1))
            celery_shop.metadata.create_all(connection)

    def call(self, *signatures):
        """Call tasks, in one transaction."""
        with self.sessions.begin() as session, unit_of_work(session):
            for signature in signatures:
                signature.apply_async()

    def task(self, name, *args, **options):
        return self.app.signature(f"shop.{name}", args, **options)

    def worker(self, *options):
        command = ("-m", "celery", "-A", "tests.celery_shop:shop", "worker", "--without-gossip", "--without-mingle", "-l", "INFO")
        return processes.Program("worker", (*command, *options), self._environment, ready="ready.")

    def relay(self):
        return processes.relay("relay", self._database_url, self.broker_url)

    @contextmanager
    def running(self, *options):
        with self.relay(), self.worker(*options) as worker:
            yield worker

    def effects(self):
        with self.engine.connect() as connection:
            return list(connection.execute(sa.select(effect.c.what).order_by(effect.c.id)).scalars())

    def begun(self):
        return [int(path.name.removeprefix("begun-")) for path in self.gate.glob("begun-*")]

    def go(self):
        (self.gate / "go").touch()


@pytest.fixture(params=["rabbitmq", "redis"])
def shop(request, database_url, tmp_path):
    broker_url = request.getfixturevalue({"rabbitmq": "vhost_url", "redis": "redis_url"}[request.param])
    shop = Shop(database_url, broker_url, tmp_path, **(REDIS if request.param == "redis" else {}))
    yield shop
    shop.app.close()
    shop.engine.dispose()


ON_REDIS_IN_THE_MATRIX = pytest.mark.parametrize(
    "shop", ["rabbitmq", pytest.param("redis", marks=pytest.mark.matrix)], indirect=True
)


def kill(pid):
    os.kill(pid, signal.SIGKILL)


@ON_REDIS_IN_THE_MATRIX
def test_each_task_has_its_effects_once(shop):
    """One worker, and all that can go wrong without anybody dying."""
    record = shop.task
    shop.call(
        record("record", "twice", task_id="same"),
        record("record", "twice", task_id="same"),
        chain(record("record", "a", task_id="head"), record("record", "b"), record("record", "c")),
        chain(record("record", "a", task_id="head"), record("record", "b"), record("record", "c")),
        record("second_try", "retried"),
        record("failing", "nothing"),
        record("careless", "nothing"),
        record("replaced", "replaced"),
        record("record", "linked").set(link=record("record", " to")),
    )
    expected = sorted(
        ["twice", "a", "ab", "abc", "retried, try 1", "replaced, first half", "replaced, second half", "linked", "linked to"]
    )
    with shop.running() as worker:
        until(lambda: len(shop.effects()) >= len(expected))
        shop.call(record("record", "last"))
        until(lambda: "last" in shop.effects())
        assert "NoUnitOfWork" in worker.log
        assert worker.terminate() == 0
    assert sorted(shop.effects()) == sorted([*expected, "last"])


def test_a_task_whose_process_is_killed_runs_again_and_has_its_effect_once(shop):
    shop.call(shop.task("held", "held"), shop.task("record", "after"))
    with shop.running():
        until(shop.begun)
        kill(shop.begun()[0])
        shop.go()
        until(lambda: len(shop.effects()) == 2)
    assert sorted(shop.effects()) == ["after", "held"]
    assert len(shop.begun()) == 2


def test_a_task_whose_worker_is_killed_runs_in_another_and_has_its_effect_once(shop):
    shop.call(shop.task("held", "held"))
    with shop.running() as worker:
        until(shop.begun)
        worker.kill()
        with shop.worker():
            until(lambda: len(shop.begun()) == 2)
            shop.go()
            until(shop.effects)
    assert shop.effects() == ["held"]


@ON_REDIS_IN_THE_MATRIX
def test_a_duplicate_that_comes_meanwhile_is_put_off_until_the_first_is_done(shop):
    shop.call(shop.task("held", "held", task_id="same"), shop.task("held", "held", task_id="same"))
    with shop.running("--concurrency", "2") as worker:
        until(lambda: "another transaction holds the message" in worker.log)
        shop.go()
        until(lambda: "a duplicate" in worker.log)
    assert shop.effects() == ["held"]
    assert len(shop.begun()) == 1


@pytest.mark.parametrize("shop", ["rabbitmq"], indirect=True)
def test_a_leased_task_whose_process_is_killed_runs_again_with_the_same_key_and_goes_on_once(shop):
    tasks = [chain(shop.task("charged", "charged", task_id="same"), shop.task("record", " and on")) for _ in range(2)]
    shop.call(*tasks)
    with shop.running() as worker:
        until(shop.begun)
        kill(shop.begun()[0])
        shop.go()
        until(lambda: "a duplicate" in worker.log)
        until(lambda: "charged and on" in shop.effects())
    asked = "charged shop.charged:same"
    assert sorted(shop.effects()) == ["charged and on", asked, asked]
