"""Times as people write them, in seconds."""

import click
import pytest
from hypothesis import given
from hypothesis import strategies as st

from outbox.cli.types import DURATION


def seconds(value):
    return DURATION.convert(value, None, None)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("500ms", 0.5),
        ("30s", 30),
        ("5m", 300),
        ("2h", 7200),
        ("7d", 604_800),
        ("1.5s", 1.5),
        ("0s", 0),
        ("12", 12),
        (" 3 s ", 3),
        (7, 7),
        (0.25, 0.25),
    ],
)
def test_a_number_with_a_unit_is_seconds(text, expected):
    assert seconds(text) == pytest.approx(expected)


@pytest.mark.parametrize(
    "text",
    ["", "s", "-1s", "1w", "1 s 2", "1m30s", "5 minutes", "1e3s", "ms", ".5s", "5.s", "inf", "nan", "1S", "٣s", True, None, [1]],
)
def test_anything_else_is_refused_with_examples(text):
    with pytest.raises(click.BadParameter, match=r"is not a time; write e\.g\. 500ms"):
        seconds(text)


@pytest.mark.parametrize("number", [-1, -0.5, float("inf"), float("nan")])
def test_a_number_from_a_file_is_held_to_the_same_rules(number):
    with pytest.raises(click.BadParameter, match="is not a time"):
        seconds(number)


@given(st.integers(min_value=0, max_value=10**6), st.sampled_from(["ms", "s", "m", "h", "d"]))
def test_units_are_what_they_say(number, unit):
    assert seconds(f"{number}{unit}") == pytest.approx(number * {"ms": 0.001, "s": 1, "m": 60, "h": 3600, "d": 86_400}[unit])
