"""The trial of the order at a small size, and that its judge sees what is wrong."""

import pytest

from tests.faults.order import Numbered, Plan, judge, run

SENT = [Numbered(key, number, "orders.placed") for key in ("a", "b") for number in (1, 2, 3)]
IN_ORDER = [("a", 1), ("b", 1), ("a", 2), ("b", 2), ("b", 3), ("a", 3)]


@pytest.mark.parametrize("kills", [0, 1])
def test_each_key_arrives_in_order_although_messages_fail_at_first_and_relays_are_killed(
    kills: int, database_url: str, vhost_url: str
) -> None:
    plan = Plan(relays=2, keys=100, messages=3000, failing=0.01, kills=kills, seed=11, timeout_s=100)

    order = run(plan, database_url, vhost_url, print)

    assert order.holds, order
    assert order.distinct == 3000
    assert kills or order.duplicates == 0


@pytest.mark.parametrize(
    ("received", "violations", "lost", "duplicates"),
    [
        (IN_ORDER, 0, 0, 0),
        ([*IN_ORDER[:4], *IN_ORDER], 0, 0, 4),  # a batch that came again after a crash
        ([("a", 2), ("a", 1), *IN_ORDER], 1, 0, 2),
        ([("a", 1), ("a", 3), ("a", 2), *IN_ORDER[3:]], 1, 1, 1),
        (IN_ORDER[:-1], 0, 1, 0),
    ],
)
def test_the_judge_sees_what_is_out_of_order_lost_or_doubled(
    received: list[tuple[str, int]], violations: int, lost: int, duplicates: int
) -> None:
    order = judge(SENT, received, leftover_rows=0, seconds=0)

    assert (order.order_violations, order.lost, order.duplicates) == (violations, lost, duplicates)
    assert order.holds == (violations == lost == 0)
