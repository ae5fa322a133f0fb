"""What became of a batch, and how that is written down."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass
from operator import attrgetter
from typing import TYPE_CHECKING, Any, NamedTuple

from outbox.reasons import storable
from outbox.states import PARKED, OnDead, Outcome, State, Verdict, decide
from outbox.store import settle

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from collections.abc import Set as AbstractSet
    from uuid import UUID

    import sqlalchemy as sa

    from outbox.outgoing import Outgoing
    from outbox.policies import Policies
    from outbox.states import Decision, RetryPolicy
    from outbox.store.claim import Holder
    from outbox.tables import Tables

FAILED = (State.SCHEDULED, State.DEAD)
_id, _partition = attrgetter("id"), attrgetter("partition")
_UNBLOCK_AT_ONCE = 1000


class Settlement(NamedTuple):
    """One message, what became of it, and its next state."""

    row: Outgoing
    verdict: Verdict
    decision: Decision
    on_dead: OnDead

    @property
    def state(self) -> State:
        """The next state."""
        return self.decision.state


@dataclass(frozen=True, slots=True)
class Judged:
    """A batch: what of it is sent, which is usually all, and what becomes of each other message; both in id order."""

    sent: Sequence[Outgoing] = ()
    rest: Sequence[Settlement] = ()

    @property
    def failures(self) -> list[Settlement]:
        """Those that have failed, or follow one that is dead."""
        return [each for each in self.rest if each.state in FAILED]

    def __len__(self) -> int:
        return len(self.sent) + len(self.rest)

    def of(self, partitions: AbstractSet[int]) -> Judged:
        """Return what is in these partitions."""
        sent = [row for row in self.sent if row.partition in partitions]
        return Judged(sent, [each for each in self.rest if each.row.partition in partitions])

    def states(self) -> Counter[State]:
        """Count the messages by their next state."""
        return Counter({State.SENT: len(self.sent)}) + Counter(each.state for each in self.rest)

    def ids(self) -> list[int]:
        """Return which are sent."""
        return list(map(_id, self.sent))

    def published(self) -> Counter[int]:
        """Count what is sent, by partition."""
        return Counter(map(_partition, self.sent))

    def failed(self) -> Counter[int]:
        """Count what has failed, by partition; not what only follows another message of its key."""
        return Counter(each.row.partition for each in self.failures if each.verdict.outcome is not Outcome.HELD)


def judge(rows: Sequence[Outgoing], verdicts: Mapping[int, Verdict], policies: Policies) -> Judged:
    """Decide the next state of every message of a batch, which is in id order."""
    sent, rest = [], []
    for row in rows:
        verdict = verdicts[row.id]
        if verdict.outcome is Outcome.CONFIRMED:
            sent.append(row)
        else:
            rest.append(_settlement(row, verdict, policies.of(row.topic)))
    return Judged(sent, _followed(rest))


def _settlement(row: Outgoing, verdict: Verdict, policy: RetryPolicy) -> Settlement:
    decision = decide(verdict.outcome, attempts=row.attempts, age_s=row.age_s, policy=policy)
    return Settlement(row, verdict, decision, policy.on_dead)


def _followed(settled: Iterable[Settlement]) -> list[Settlement]:
    """Let those that were held back because an earlier message of their key is now dead do what its policy says."""
    dead: dict[str, Settlement] = {}
    followed = []
    for each in settled:
        head = dead.get(each.row.key or "")
        if head is not None and each.verdict.outcome is Outcome.HELD:
            followed.append(_follow(each, head))
            continue
        if each.state is State.DEAD and each.row.key is not None:
            dead[each.row.key] = each
        followed.append(each)
    return followed


def _follow(each: Settlement, head: Settlement) -> Settlement:
    match head.on_dead:
        case OnDead.SKIP:
            return each._replace(decision=each.decision._replace(state=State.PENDING))
        case OnDead.PARK:
            return parked(each, head.row.message_id)
        case OnDead.BLOCK:
            return each


def parked(each: Settlement, head: UUID) -> Settlement:
    """Return the settlement of a message that follows a dead one of its key into the dead letters."""
    verdict = Verdict(Outcome.HELD, parked_reason(head), PARKED)
    return each._replace(verdict=verdict, decision=each.decision._replace(state=State.DEAD), on_dead=OnDead.PARK)


def parked_reason(head: UUID) -> str:
    """Return why a message is dead that has not failed itself."""
    return f"parked behind message {head}, which is dead"


def waiting(row: Outgoing, holder: Holder | None, policies: Policies) -> Settlement:
    """Decide what becomes of a claimed message that an earlier one of its key holds back.

    `holder` was read after the row; if it is a later message, the earlier one has come back meanwhile.
    """
    blocked = _settlement(row, Verdict(Outcome.HELD), policies.of(row.topic))
    if holder is None or holder.id > row.id or holder.state is not State.DEAD:
        return blocked
    # One that is parked itself follows its head's policy, and not its own topic's, also when that head is discarded.
    parks = holder.parked or policies.of(holder.topic).on_dead is OnDead.PARK
    return parked(blocked, holder.message_id) if parks else blocked


def write(connection: sa.Connection, tables: Tables, judged: Judged) -> None:
    """Write the next states of what was not sent, and of what waited behind any of these.

    The caller holds the rows of the leases' partitions, see `store.settle.release`, which has written down what was sent.
    """
    groups: dict[State, list[Settlement]] = defaultdict(list)
    for each in judged.rest:
        groups[each.state].append(each)
    if scheduled := groups[State.SCHEDULED]:
        settle.schedule(connection, tables, [{**_failure(each), "delay_s": each.decision.delay_s} for each in scheduled])
    if dead := groups[State.DEAD]:
        settle.bury(connection, tables, [{**_failure(each), "holds_key": each.on_dead is not OnDead.SKIP} for each in dead])
    if blocked := groups[State.BLOCKED]:
        settle.block(connection, tables, [each.row.id for each in blocked])
    _release_followers(connection, tables, judged)


def _release_followers(connection: sa.Connection, tables: Tables, judged: Judged) -> None:
    """Do what is due with those that were blocked before, behind a message of their key that is now sent or dead."""
    free = {row.key for row in judged.sent if row.held_id is not None and row.key is not None and row.holds_others}
    for each in judged.rest:
        key = each.row.key
        if key is None or not each.row.holds_others or each.state not in FAILED:
            continue
        free.discard(key)  # an earlier one may have been sent, but now they wait behind this one
        if each.state is State.DEAD and each.on_dead is OnDead.SKIP:
            free.add(key)
        elif each.state is State.DEAD and each.on_dead is OnDead.PARK:
            settle.park(connection, tables, [key], reason=parked_reason(each.row.message_id))
    if free:
        settle.unblock(connection, tables, sorted(free), most=_UNBLOCK_AT_ONCE)


def _failure(each: Settlement) -> dict[str, Any]:
    return {
        "row_id": each.row.id,
        "attempts_spent": each.decision.attempts,
        "error": storable(each.verdict.reason),
        "error_kind": each.verdict.error_class,
    }
