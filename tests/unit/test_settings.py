"""The relay's settings: values that cannot work are refused, and the text says which."""

import math

import pytest

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
    with pytest.raises(ConfigurationError, match=r"lease \(20 s\) must be at least 5 s longer than confirm-timeout \(15.5 s\)"):
        RelaySettings(**URLS, lease_s=20, confirm_timeout_s=15.5)

    assert RelaySettings(**URLS, lease_s=20, confirm_timeout_s=15).lease_s == 20


def test_every_process_start_has_an_owner_of_its_own():
    assert RelaySettings(**URLS).owner != RelaySettings(**URLS).owner
