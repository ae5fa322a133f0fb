"""What claims read, as EXPLAIN says: every statement of a claim is explained first, in a savepoint that is rolled back."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import sqlalchemy as sa
from sqlalchemy import event

from outbox.policies import Policies
from outbox.publishers.flight import CONFIRMED
from outbox.relay.batch import Batch
from outbox.relay.cursor import LOOK_EVERY_S
from outbox.relay.transactions import Transactions
from outbox.tables import DEFAULT

BATCH = 1000
_EXPLAINED = ("WITH", "SELECT", "UPDATE", "(SELECT")
_EVERY = 10


@dataclass(frozen=True)
class Cost:
    """Pages that one claim reads: the most of those that were explained on the way, and one when the cursor has come up."""

    worst: int
    settled: int


def drain(engine: sa.Engine, messages: int, *, again: Callable[[], None]) -> Cost:
    """Claim and settle all that is pending, without a broker; let the cursor come up, call `again`, and claim once more."""
    relay = Transactions(engine, DEFAULT, owner="bench", lease_s=30, batch_size=BATCH, policies=Policies())
    done, worst, claims = 0, 0, 0
    while done < messages:
        batch, pages = _explained(engine, relay) if claims % _EVERY == 0 else (relay.claim(), 0)
        claims += 1
        worst = max(worst, pages)
        if batch is None:
            raise RuntimeError(f"{done} of {messages} messages were claimed, and no more are found")
        done += _settle(relay, batch)
    for _ in range(4):  # a look, one more that finds the writers gone, and the searches between them
        time.sleep(LOOK_EVERY_S)
        if relay.claim() is not None:
            raise RuntimeError("more messages were found than were written")
    again()
    batch, settled = _explained(engine, relay)
    while batch is not None:
        done += _settle(relay, batch)
        batch = relay.claim()
    if done != messages + BATCH:
        raise RuntimeError(f"{done} messages were claimed of {messages + BATCH}")
    return Cost(worst=worst, settled=settled)


def _settle(relay: Transactions, batch: Batch) -> int:
    relay.settle(batch, {row.id: CONFIRMED for row in batch.rows})
    return len(batch.rows)


def _explained(engine: sa.Engine, relay: Transactions) -> tuple[Batch | None, int]:
    with _explaining(engine) as pages:
        batch = relay.claim()
    return batch, sum(pages)


@contextmanager
def _explaining(engine: sa.Engine) -> Iterator[list[int]]:
    """Collect how many pages each statement touches, in shared buffers."""
    pages: list[int] = []

    def explain(_connection: Any, cursor: Any, statement: str, parameters: Any, *_: Any) -> None:
        if not statement.lstrip().startswith(_EXPLAINED):
            return
        with cursor.connection.transaction(force_rollback=True), cursor.connection.cursor() as own:
            own.execute(f"EXPLAIN (ANALYZE, BUFFERS, FORMAT JSON) {statement}", parameters)
            plan = own.fetchone()[0][0]["Plan"]
            pages.append(plan["Shared Hit Blocks"] + plan["Shared Read Blocks"])

    event.listen(engine, "before_cursor_execute", explain)
    try:
        yield pages
    finally:
        event.remove(engine, "before_cursor_execute", explain)
