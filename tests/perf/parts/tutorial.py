"""The relay that tutorials show: lock some rows, publish each and wait for its confirm, mark each as sent, commit.

A program of its own, `python -m tests.perf.parts.tutorial DATABASE_URL BROKER_URL`, with psycopg and kombu alone.
"""

import signal
import sys
import time
from types import FrameType

import kombu
import psycopg

TABLE = """
CREATE TABLE tutorial_outbox (
    id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    topic text NOT NULL,
    payload jsonb NOT NULL,
    created_at timestamptz NOT NULL DEFAULT now(),
    sent_at timestamptz
);
CREATE INDEX tutorial_outbox_unsent ON tutorial_outbox (id) WHERE sent_at IS NULL
"""
BATCH = 100
POLL_S = 0.1
TAKE = (
    f"SELECT id, topic, payload::text FROM tutorial_outbox WHERE sent_at IS NULL ORDER BY id LIMIT {BATCH} FOR UPDATE SKIP LOCKED"
)


class Stop(Exception):
    """We were asked to stop."""


def main() -> None:
    """Relay until asked to stop."""
    signal.signal(signal.SIGTERM, _stop)
    database_url, broker_url = sys.argv[1:]
    with (
        psycopg.connect(database_url) as connection,
        kombu.Connection(broker_url, transport_options={"confirm_publish": True}) as broker,
    ):
        producer = broker.Producer()
        print("ready", flush=True)
        while True:
            if not _batch(connection, producer):
                time.sleep(POLL_S)


def _batch(connection: psycopg.Connection, producer: kombu.Producer) -> bool:
    with connection.transaction():
        rows = connection.execute(TAKE).fetchall()
        for number, topic, payload in rows:
            producer.publish(
                payload, exchange="", routing_key=topic, content_type="application/json", delivery_mode=2, mandatory=True
            )
            connection.execute("UPDATE tutorial_outbox SET sent_at = now() WHERE id = %s", [number])
    return bool(rows)


def _stop(_signal: int, _frame: FrameType | None) -> None:
    raise Stop


if __name__ == "__main__":
    try:
        main()
    except Stop:
        sys.exit(0)
