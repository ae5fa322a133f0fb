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
        (Outcome.REFUSED, 0, Decision(State.SCHEDULED, 0, 100)),
        (Outcome.REFUSED, 2, Decision(State.SCHEDULED, 2, 100)),
        (Outcome.REJECTED, 0, Decision(State.SCHEDULED, 1, 10)),
        (Outcome.REJECTED, 1, Decision(State.SCHEDULED, 2, 20)),
        (Outcome.REJECTED, 2, Decision(State.DEAD, 3)),
        (Outcome.REJECTED, 9, Decision(State.DEAD, 10)),
        (Outcome.UNPUBLISHABLE, 0, Decision(State.DEAD, 1)),
    ],
)
def test_the_next_state_follows_from_the_outcome(outcome, attempts, decision):
    assert decide(outcome, attempts=attempts, age_s=100, policy=POLICY) == decision


@pytest.mark.parametrize("outcome", Outcome)
def test_every_outcome_is_decided(outcome):
    assert decide(outcome, attempts=0, age_s=0, policy=POLICY).state in State


@pytest.mark.parametrize("outcome", [Outcome.REFUSED, Outcome.UNSENT, Outcome.UNKNOWN, Outcome.HELD])
@pytest.mark.parametrize("attempts", [0, 2, 3, 1000])
def test_trouble_with_the_broker_spends_no_attempt_and_kills_nothing(outcome, attempts):
    decision = decide(outcome, attempts=attempts, age_s=100, policy=POLICY)
    assert decision.attempts == attempts
    assert decision.state is not State.DEAD


@pytest.mark.parametrize(("age_s", "delay_s"), [(0, 10), (9, 10), (60, 60), (86_400, 1000)])
def test_what_the_broker_refuses_waits_about_as_long_as_it_has_waited(age_s, delay_s):
    assert decide(Outcome.REFUSED, attempts=0, age_s=age_s, policy=POLICY).delay_s == delay_s


def test_a_failure_of_a_message_that_is_too_old_is_its_last():
    policy = RetryPolicy(max_attempts=100, max_age_s=3600)
    assert decide(Outcome.REJECTED, attempts=0, age_s=3599, policy=policy).state is State.SCHEDULED
    assert decide(Outcome.REJECTED, attempts=0, age_s=3600, policy=policy) == Decision(State.DEAD, 1)
    assert decide(Outcome.UNKNOWN, attempts=0, age_s=1e9, policy=policy).state is State.PENDING
