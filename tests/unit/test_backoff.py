"""Delays double up to a ceiling and are spread by jitter."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outbox.backoff import Backoff


@pytest.mark.parametrize(("failures", "bound"), [(0, 1), (1, 1), (2, 2), (3, 4), (9, 256), (10, 300), (10**9, 300)])
def test_the_bound_doubles_up_to_the_ceiling(failures, bound):
    assert Backoff(first_s=1, ceiling_s=300).bound_s(failures) == bound


@given(st.integers(min_value=0, max_value=10**6), st.floats(min_value=0, max_value=1))
def test_a_delay_lies_between_its_floor_and_its_bound(failures, floor):
    backoff = Backoff(floor=floor)
    bound = backoff.bound_s(failures)
    assert floor * bound <= backoff.delay_s(failures) <= bound


def test_delays_differ_so_that_processes_do_not_come_back_together():
    assert len({Backoff().delay_s(5) for _ in range(20)}) > 1
