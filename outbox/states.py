"""The states of a message, what a publish can come to, and the one pure function that leads from one to the other."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple

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
    """The outcome of one message, and when it failed the reason in words and the error's class in one."""

    outcome: Outcome
    reason: str | None = None
    error_class: str | None = None


class OnDead(StrEnum):
    """What becomes of the later messages of a key when one of its messages is dead."""

    BLOCK = "block"  # they wait until an operator has retried or discarded it
    SKIP = "skip"  # they go on without it
    PARK = "park"  # they follow it into the dead letters, and what comes later follows them, whatever its own topic says


PARKED = "Parked"
"""The error class of a message that is dead only because it followed a dead one of its key, see `OnDead.PARK`."""


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """How often, and how far apart, a message that fails by its own fault is tried again, and what follows if in vain.

    It is given up after `max_attempts` such failures, or at one that finds it older than `max_age_s` seconds.
    """

    max_attempts: int = 20
    backoff: Backoff = field(default_factory=Backoff)
    max_age_s: float | None = None
    on_dead: OnDead = OnDead.BLOCK


class Decision(NamedTuple):
    """What to write down: the next state, attempts so far, and for `scheduled` the delay in seconds."""

    state: State
    attempts: int
    delay_s: float = 0.0


def decide(outcome: Outcome, *, attempts: int, age_s: float, policy: RetryPolicy) -> Decision:
    """Decide the next state of a pending message that was enqueued `age_s` seconds ago and has failed `attempts` times.

    Trouble with the broker never spends an attempt: an outage of any length leaves `attempts` as it was. A message that
    the broker refuses waits about as long as it has waited before, so its tries get rarer without being counted.
    """
    match outcome:
        case Outcome.CONFIRMED:
            return Decision(State.SENT, attempts)
        case Outcome.UNSENT | Outcome.UNKNOWN:
            return Decision(State.PENDING, attempts)
        case Outcome.HELD:
            return Decision(State.BLOCKED, attempts)
        case Outcome.REFUSED:
            return Decision(State.SCHEDULED, attempts, policy.backoff.waited_s(age_s))
        case Outcome.UNPUBLISHABLE:
            return Decision(State.DEAD, attempts + 1)
        case Outcome.REJECTED:
            spent = attempts + 1
            if spent >= policy.max_attempts or (policy.max_age_s is not None and age_s >= policy.max_age_s):
                return Decision(State.DEAD, spent)
            return Decision(State.SCHEDULED, spent, policy.backoff.delay_s(spent))
