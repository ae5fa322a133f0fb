"""The pool that a consumer asks for is one that it can work with, on real servers."""

import threading

import sqlalchemy as sa
from sqlalchemy.orm import Session, sessionmaker

from outbox import Inbox, Message
from outbox.backoff import Backoff
from outbox.inbox import RetryPolicy
from outbox.inbox.room import BESIDES
from tests.integration.consuming import WAIT_S, Shop, record, running, until

WORKERS = 4


def test_all_workers_in_their_transactions_leave_room_for_what_is_due_and_for_a_probe(database_url: str, vhost_url: str) -> None:
    shop = Shop(database_url, vhost_url)
    engine = sa.create_engine(database_url, pool_size=WORKERS + BESIDES, max_overflow=0, pool_timeout=2)
    inbox = Inbox("shipping", sessions=sessionmaker(engine))
    all_in, release = threading.Barrier(WORKERS + 1), threading.Event()
    refused = threading.Event()

    @inbox.transactional("orders.*", retry=RetryPolicy(backoff=Backoff(first_s=0, ceiling_s=0)))
    def handle(session: Session, message: Message) -> None:
        record(session, message)
        if not refused.is_set():
            refused.set()
            raise ValueError("once")
        all_in.wait(WAIT_S)
        release.wait(WAIT_S)

    shop.declare(inbox)
    shop.publish("refused at first")
    with running(inbox, shop.broker_url, workers=WORKERS) as runner:
        refused.wait(WAIT_S)
        shop.publish_many(WORKERS - 1)
        all_in.wait(WAIT_S)  # what was due has been claimed beside the others
        runner.check()
        release.set()
        until(lambda: len(shop.effects()) == WORKERS)
    assert runner.counts == {"handled": WORKERS, "retry": 1}
    engine.dispose()
    shop.close()
