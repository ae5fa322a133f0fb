"""The same messages delivered to two processes of one consumer at the same moment."""

import os
import subprocess
import sys
from pathlib import Path

import kombu
import pytest

from tests.integration.consuming import WAIT_S, Shop, until
from tests.servers.rabbitmq import RabbitMQ

ROOT = Path(__file__).parents[2]
MESSAGES = 1000

APP = """
import os
import sqlalchemy as sa
from sqlalchemy.orm import sessionmaker
from outbox import Inbox

sessions = sessionmaker(sa.create_engine(os.environ["SHOP_DATABASE"]))
inbox = Inbox("shipping", sessions=sessions, queue=os.environ["SHOP_QUEUE"])

@inbox.transactional("orders.*")
def ship(session, message):
    session.execute(sa.text("INSERT INTO effects VALUES (:id)"), {"id": message.message_id})
"""


@pytest.mark.parametrize("workers", [4, pytest.param(1, marks=pytest.mark.matrix)])
def test_each_effect_is_there_once_without_a_deadlock_or_a_complaint(
    database_url: str, own_rabbitmq: RabbitMQ, tmp_path: Path, workers: int
) -> None:
    vhost_url = own_rabbitmq.create_vhost()
    shop = Shop(database_url, vhost_url)
    queues = ("one", "two")  # each gets every message, so both processes have the same one in hand all the time
    for queue in queues:
        shop.inbox = shop.new_inbox(queue=queue)
        shop.inbox.transactional("orders.*")(print)
        shop.declare()
    shop.publish_many(MESSAGES)
    (tmp_path / "app.py").write_text(APP)
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OUTBOX_BROKER_URL": vhost_url, "SHOP_DATABASE": database_url}
    command = [sys.executable, "-m", "outbox.cli.consume", "app:inbox", "--workers", str(workers)]
    consumers = [
        subprocess.Popen(command, cwd=tmp_path, env={**env, "SHOP_QUEUE": queue}, stderr=subprocess.PIPE, text=True)
        for queue in queues
    ]
    until(lambda: len(shop.effects()) == MESSAGES and _left(own_rabbitmq, vhost_url) == 0, within_s=60)
    for consumer in consumers:
        consumer.terminate()
    said = [consumer.communicate(timeout=WAIT_S)[1] for consumer in consumers]
    assert [consumer.returncode for consumer in consumers] == [0, 0]
    assert not [line for text in said for line in text.splitlines() if "WARNING" in line or "ERROR" in line]
    assert len(set(shop.effects())) == len(shop.effects()) == MESSAGES
    assert [_ready(shop, queue) for queue in queues] == [0, 0]  # also what a process had in hand was acknowledged
    assert shop.failed() == []
    shop.close()


def _left(server: RabbitMQ, vhost_url: str) -> int:
    """How many messages the queues hold, those that a consumer has in hand included."""
    vhost = vhost_url.rpartition("/")[2]
    told = server.ctl("list_queues", "--vhost", vhost, "--quiet", "--no-table-headers", "messages")
    return sum(map(int, told.split()))


def _ready(shop: Shop, queue: str) -> int:
    with kombu.Connection(shop.broker_url) as connection, connection.channel() as channel:
        return int(channel.queue_declare(queue, passive=True).message_count)
