"""The states of a message, what a publish can come to, and the one pure function that leads from one to the other."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from outbox.backoff import Backoff


class State(StrEnum):
    """Where a message stands; the words that `outbox_message.state` holds."""

    SCHEDULED = "scheduled"  # due later: delayed by the application, or backing off after a failure
    PENDING = "pending"  # deliverable now
    BLOCKED = "blocked"  # waits behind an earlier message of its key that is backing off or dead
    SENT = "sent"  # published; the row is deleted at once unless a retention is set
    DEAD = "dead"  # given up; kept until an operator decides


class Outcome(StrEnum):
    """What became of one message of a claimed batch."""

    CONFIRMED = "confirmed"  # the broker has it
    REFUSED = "refused"  # the broker would not take it now (a nack under pressure): not the message's fault
    REJECTED = "rejected"  # cannot be delivered as things are (unroutable, no such exchange): its own fault
    UNPUBLISHABLE = "unpublishable"  # can never be put on the wire as it is
    HELD = "held"  # not sent, because an earlier message of its key failed
    UNSENT = "unsent"  # not sent, because the relay stopped or lost the broker or its lease
    UNKNOWN = "unknown"  # sent, and the connection was lost before the confirm


@dataclass(frozen=True, slots=True)
class Verdict:
    """The outcome of one message with the reason, in words, when it failed."""

    outcome: Outcome
    reason: str | None = None


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """How often, and how far apart, a message that fails by its own fault is tried again."""

    max_attempts: int = 20
    backoff: Backoff = field(default_factory=Backoff)


@dataclass(frozen=True, slots=True)
class Decision:
    """What to write down: the next state, attempts so far, and for `scheduled` the delay in seconds."""

    state: State
    attempts: int
    delay_s: float = 0.0


def decide(outcome: Outcome, *, attempts: int, policy: RetryPolicy) -> Decision:
    """Decide the next state of a pending message that has failed `attempts` times before.

    Trouble with the broker never spends an attempt: an outage of any length leaves `attempts` as it was.
    """
    match outcome:
        case Outcome.CONFIRMED:
            return Decision(State.SENT, attempts)
        case Outcome.UNSENT | Outcome.UNKNOWN:
            return Decision(State.PENDING, attempts)
        case Outcome.HELD:
            return Decision(State.BLOCKED, attempts)
        case Outcome.REFUSED:
            return Decision(State.SCHEDULED, attempts, policy.backoff.delay_s(attempts + 1))
        case Outcome.UNPUBLISHABLE:
            return Decision(State.DEAD, attempts + 1)
        case Outcome.REJECTED:
            spent = attempts + 1
            if spent >= policy.max_attempts:
                return Decision(State.DEAD, spent)
            return Decision(State.SCHEDULED, spent, policy.backoff.delay_s(spent))
