"""For how long a relay may publish a message again, and that an inbox must not forget earlier."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outbox.backoff import Backoff
from outbox.errors import ConfigurationError
from outbox.policies import Policies
from outbox.settings import RelaySettings
from outbox.spans import redelivery_span, retries_s
from outbox.states import RetryPolicy

URLS = {"database_url": "sqlite://", "broker_url": "memory://"}
DAY_S = 86_400.0


@pytest.mark.parametrize(("failures", "total"), [(-1, 0), (0, 0), (1, 1), (2, 3), (9, 511), (10, 811), (19, 3511)])
def test_the_delays_add_up(failures, total):
    assert Backoff(first_s=1, ceiling_s=300).total_s(failures) == total


@given(st.integers(min_value=0, max_value=300), st.floats(min_value=0, max_value=100), st.floats(min_value=0, max_value=1e12))
def test_the_total_is_the_sum_of_the_bounds(failures, first_s, ceiling_s):
    backoff = Backoff(first_s=first_s, ceiling_s=max(first_s, ceiling_s))
    assert backoff.total_s(failures) == pytest.approx(sum(backoff.bound_s(each) for each in range(1, failures + 1)))


def test_a_total_of_endless_attempts_is_found_at_once():
    assert Backoff(first_s=1, ceiling_s=1).total_s(10**12) == 10**12


def test_nothing_is_retried_after_one_attempt():
    assert retries_s(RetryPolicy(max_attempts=1, max_age_s=DAY_S)) == 0


def test_the_last_try_follows_the_last_delay_but_one():
    assert retries_s(RetryPolicy(max_attempts=4, backoff=Backoff(first_s=1, ceiling_s=300))) == 1 + 2 + 4


def test_a_message_that_is_nearly_too_old_is_delayed_once_more():
    policy = RetryPolicy(max_attempts=20, backoff=Backoff(first_s=1, ceiling_s=300), max_age_s=600)
    assert retries_s(policy) == 600 + 300


def test_an_age_that_is_never_reached_changes_nothing():
    backoff = Backoff(first_s=1, ceiling_s=300)
    assert retries_s(RetryPolicy(max_attempts=3, backoff=backoff, max_age_s=DAY_S)) == 3


def test_the_span_is_that_of_the_most_patient_policy_and_a_lease():
    patient = RetryPolicy(max_attempts=11, backoff=Backoff(first_s=3600, ceiling_s=3600))
    hasty = RetryPolicy(max_attempts=1)

    span = redelivery_span(Policies(hasty, (("a.*", hasty), ("b.#", patient))), lease_s=30, poll_interval_s=2)
    assert (span.total_s, span.topics) == (36_052, "b.#")
    assert str(span) == (
        "36052 s, of which 36000 s are for retries (for topics b.#), 30 s for the lease and 22 s for the polls in between"
    )
    assert redelivery_span(Policies(patient, (("a", hasty),)), lease_s=30, poll_interval_s=2).topics is None


def test_an_inbox_that_forgets_within_the_span_is_refused_with_the_sum():
    with pytest.raises(ConfigurationError) as refused:
        RelaySettings(**URLS, inbox_retention_s=3551)

    assert str(refused.value) == (
        "inbox-retention (3551 s) must be longer than the time over which this relay may publish a message again, or consumers "
        "handle it again: 3551 s, of which 3511 s are for retries (by default), 30 s for the lease and 10 s for the polls in between"
    )
    assert RelaySettings(**URLS, inbox_retention_s=3552).inbox_retention_s == 3552


def test_one_patient_topic_is_enough_for_a_refusal():
    patient = RetryPolicy(max_attempts=100, backoff=Backoff(first_s=60, ceiling_s=DAY_S))
    with pytest.raises(ConfigurationError, match=r"for topics slow\.#"):
        RelaySettings(**URLS, inbox_retention_s=30 * DAY_S, policies=Policies(by_topic=(("slow.#", patient),)))


def test_the_outbox_may_be_kept_for_any_time_and_nothing_is_kept_by_default():
    assert RelaySettings(**URLS, retention_s=1).retention_s == 1
    assert (RelaySettings(**URLS).retention_s, RelaySettings(**URLS).inbox_retention_s) == (None, None)


@pytest.mark.parametrize("name", ["retention", "inbox-retention"])
@pytest.mark.parametrize("value", [0, -1, float("nan"), float("inf"), 1e10])
def test_a_time_that_no_database_can_count_back_is_refused(name, value):
    with pytest.raises(ConfigurationError, match=f"^{name} must be more than zero and at most 100 years"):
        RelaySettings(**URLS, **{name.replace("-", "_") + "_s": value})
