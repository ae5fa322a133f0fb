"""What became of a batch, and how that is written down."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from outbox.states import State, decide
from outbox.store import settle

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    import sqlalchemy as sa

    from outbox.outgoing import Outgoing
    from outbox.states import Decision, RetryPolicy, Verdict
    from outbox.tables import Tables

FAILED = (State.SCHEDULED, State.DEAD)
_UNBLOCK_AT_ONCE = 1000
_ERROR_LENGTH = 2000


@dataclass(frozen=True, slots=True)
class Settlement:
    """One message, what became of it, and its next state."""

    row: Outgoing
    verdict: Verdict
    decision: Decision

    @property
    def state(self) -> State:
        """The next state."""
        return self.decision.state


def settlements(rows: Iterable[Outgoing], verdicts: Mapping[int, Verdict], policy: RetryPolicy) -> list[Settlement]:
    """Decide the next state of every message of a batch."""
    return [
        Settlement(row, verdicts[row.id], decide(verdicts[row.id].outcome, attempts=row.attempts, policy=policy)) for row in rows
    ]


def by_partition(settled: Iterable[Settlement], *states: State) -> Counter[int]:
    """Count the messages that come to one of these states, by partition."""
    return Counter(each.row.partition for each in settled if each.state in states)


def write(connection: sa.Connection, tables: Tables, settled: Sequence[Settlement]) -> None:
    """Write the next states. The caller holds the rows of the leases' partitions, see `store.settle.release`."""
    groups: dict[State, list[Settlement]] = defaultdict(list)
    for each in settled:
        groups[each.state].append(each)
    if sent := groups[State.SENT]:
        settle.delete_sent(connection, tables, _ids(sent))
        keys = {each.row.key for each in sent if each.row.key is not None and each.row.holds_others}
        if keys:
            settle.unblock(connection, tables, sorted(keys), most=_UNBLOCK_AT_ONCE)
    if scheduled := groups[State.SCHEDULED]:
        settle.schedule(connection, tables, [{**_failure(each), "delay_s": each.decision.delay_s} for each in scheduled])
    if dead := groups[State.DEAD]:
        settle.bury(connection, tables, [_failure(each) for each in dead])
    if blocked := groups[State.BLOCKED]:
        settle.block(connection, tables, _ids(blocked))


def _ids(settled: Iterable[Settlement]) -> list[int]:
    return [each.row.id for each in settled]


def _failure(each: Settlement) -> dict[str, Any]:
    return {"row_id": each.row.id, "attempts_spent": each.decision.attempts, "error": storable(each.verdict.reason)}


def storable(text: str | None) -> str:
    """Return an error text that every database takes: no NUL, no lone surrogate, not endless, not empty."""
    clean = (text or "unknown").replace("\x00", "\\x00").encode(errors="backslashreplace").decode()
    return clean[:_ERROR_LENGTH]
