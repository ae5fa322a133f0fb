"""What a publish came to decides the next state, and nothing else does."""

import pytest

from outbox.backoff import Backoff
from outbox.states import Decision, Outcome, RetryPolicy, State, decide

POLICY = RetryPolicy(max_attempts=3, backoff=Backoff(first_s=10, ceiling_s=1000, floor=1.0))  # without jitter


@pytest.mark.parametrize(
    ("outcome", "attempts", "decision"),
    [
        (Outcome.CONFIRMED, 0, Decision(State.SENT, 0)),
        (Outcome.CONFIRMED, 2, Decision(State.SENT, 2)),
        (Outcome.UNSENT, 1, Decision(State.PENDING, 1)),
        (Outcome.UNKNOWN, 1, Decision(State.PENDING, 1)),
        (Outcome.HELD, 0, Decision(State.BLOCKED, 0)),
        (Outcome.REFUSED, 0, Decision(State.SCHEDULED, 0, 10)),
        (Outcome.REFUSED, 2, Decision(State.SCHEDULED, 2, 40)),
        (Outcome.REJECTED, 0, Decision(State.SCHEDULED, 1, 10)),
        (Outcome.REJECTED, 1, Decision(State.SCHEDULED, 2, 20)),
        (Outcome.REJECTED, 2, Decision(State.DEAD, 3)),
        (Outcome.REJECTED, 9, Decision(State.DEAD, 10)),
        (Outcome.UNPUBLISHABLE, 0, Decision(State.DEAD, 1)),
    ],
)
def test_the_next_state_follows_from_the_outcome(outcome, attempts, decision):
    assert decide(outcome, attempts=attempts, policy=POLICY) == decision


@pytest.mark.parametrize("outcome", Outcome)
def test_every_outcome_is_decided(outcome):
    assert decide(outcome, attempts=0, policy=POLICY).state in State


@pytest.mark.parametrize("outcome", [Outcome.REFUSED, Outcome.UNSENT, Outcome.UNKNOWN, Outcome.HELD])
@pytest.mark.parametrize("attempts", [0, 2, 3, 1000])
def test_trouble_with_the_broker_spends_no_attempt_and_kills_nothing(outcome, attempts):
    decision = decide(outcome, attempts=attempts, policy=POLICY)
    assert decision.attempts == attempts
    assert decision.state is not State.DEAD
