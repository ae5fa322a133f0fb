"""What metrics show of the tables: read often, so each look has a bound, however much there is. Reads only; locks nothing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from outbox.states import State
from outbox.store.dialects import set_locally
from outbox.store.oldest import oldest_deliverable_s
from outbox.store.plans import WALKING
from outbox.store.registry import alive
from outbox.store.stats import count

if TYPE_CHECKING:
    import sqlalchemy as sa

    from outbox.tables import Tables

MOST_COUNTED = 5000
"""How many messages of one state are counted: the whole look then took 3 ms among five million, and 9 when they were not vacuumed (m)."""

_IN_LINE = 10


@dataclass(frozen=True, slots=True)
class Gauges:
    """One look at the outbox. A count of `counted_up_to` means so many or more. `oldest_deliverable_s` is None when nothing is."""

    messages: dict[State, int]
    counted_up_to: int
    oldest_deliverable_s: float | None
    relays_alive: int


def gauges(connection: sa.Connection, tables: Tables) -> Gauges:
    """Look at the outbox, by the index of each state alone."""
    set_locally(connection, **WALKING)
    return Gauges(
        messages={state: count(connection, tables, state, most=MOST_COUNTED) for state in State},
        counted_up_to=MOST_COUNTED,
        oldest_deliverable_s=oldest_deliverable_s(connection, tables, in_line=_IN_LINE),
        relays_alive=alive(connection, tables),
    )
