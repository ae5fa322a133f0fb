"""The ledger at a small size; `make ledger` runs it at its full one."""

import pytest

from tests.faults.ledger import Plan, run


@pytest.mark.timeout(300)
@pytest.mark.parametrize("seed", [7, 2024])
def test_every_committed_order_has_its_effect_once_although_everything_is_killed(
    seed: int, database_url: str, vhost_url: str
) -> None:
    plan = Plan(orders=800, writers=4, rollback=0.2, kills=2, seed=seed, timeout_s=200)

    ledger = run(plan, database_url, vhost_url, print)

    assert ledger.balances, ledger
    assert ledger.committed == ledger.handled > 0


@pytest.mark.timeout(300)
def test_a_listener_that_raises_at_every_event_changes_no_orders_fate(database_url: str, vhost_url: str) -> None:
    plan = Plan(orders=250, writers=2, rollback=0.2, kills=1, seed=11, timeout_s=200, heckled=True)

    ledger = run(plan, database_url, vhost_url, print)

    assert ledger.balances, ledger
    assert ledger.committed == ledger.handled > 0
