"""The relay's settings: values that cannot work are refused, and the text says which."""

import math

import pytest

from outbox.backoff import Backoff
from outbox.errors import ConfigurationError
from outbox.settings import RelaySettings

URLS = {"database_url": "sqlite://", "broker_url": "memory://"}


def test_the_defaults_work():
    settings = RelaySettings(**URLS)

    assert settings.lease_s >= settings.confirm_timeout_s + 5


@pytest.mark.parametrize("name", ["lease_s", "confirm_timeout_s", "poll_interval_s", "batch_size"])
@pytest.mark.parametrize("value", [0, -1, math.nan, math.inf])
def test_nothing_that_must_be_more_than_zero_may_be_less(name, value):
    with pytest.raises(ConfigurationError, match=f"^{name.removesuffix('_s').replace('_', '-')} must be .* more than zero"):
        RelaySettings(**URLS | {name: value})


@pytest.mark.parametrize("grace_s", [-1, math.nan, math.inf])
def test_a_grace_is_zero_or_more(grace_s):
    with pytest.raises(ConfigurationError, match=r"^grace must be"):
        RelaySettings(**URLS, grace_s=grace_s)


def test_a_grace_may_be_nothing_at_all():
    assert RelaySettings(**URLS, grace_s=0).grace_s == 0


def test_a_lease_that_ends_while_confirms_may_still_come_is_refused():
    with pytest.raises(ConfigurationError, match=r"lease must be at least 5 s longer than .*: 20 s < 15.5 s \+ 5 s"):
        RelaySettings(**URLS, lease_s=20, confirm_timeout_s=15.5)

    assert RelaySettings(**URLS, lease_s=20, confirm_timeout_s=15).lease_s == 20


def test_every_process_start_has_an_owner_of_its_own():
    assert RelaySettings(**URLS).owner != RelaySettings(**URLS).owner


@pytest.mark.parametrize("batch_size", [10_001, 1.5])
def test_a_batch_is_a_whole_number_of_messages_that_memory_can_hold(batch_size):
    with pytest.raises(ConfigurationError, match="batch-size must be a whole number from 1 to 10000, not "):
        RelaySettings(**URLS, batch_size=batch_size)


@pytest.mark.parametrize("delays", [(10, 5), (-1, 5), (1, math.inf), (math.nan, 5), (5, math.nan)])
def test_retries_whose_first_delay_is_longer_than_the_longest_are_refused_with_both(delays):
    first_s, ceiling_s = delays
    with pytest.raises(ConfigurationError, match=r"retry-first.* must not be longer than .*retry-ceiling.*: -?\w+ s > \w+ s"):
        Backoff(first_s=first_s, ceiling_s=ceiling_s)


def test_the_polls_between_retries_count_for_how_long_an_inbox_must_remember():
    with pytest.raises(ConfigurationError, match=r"3511 s are for retries .*, 30 s for the lease and 600 s for the polls"):
        RelaySettings(**URLS, poll_interval_s=30, inbox_retention_s=4000)
    assert RelaySettings(**URLS, poll_interval_s=30, inbox_retention_s=4142).inbox_retention_s == 4142
