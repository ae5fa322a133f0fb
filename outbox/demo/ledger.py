"""The ledger of a demo: counted from the tables and the consumer's effects, never from a counter of the library."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

from outbox.demo.observer import number, observing

if TYPE_CHECKING:
    from outbox.demo.folder import Folder

_QUERIES = {
    "orders_committed": "SELECT count(*) FROM orders",
    "orders_rolled_back": "SELECT count(*) FROM refusals",
    "shipped": "SELECT count(*) FROM shipments",
    "published_more_than_once": "SELECT count(*) FROM (SELECT 1 FROM published GROUP BY message_id HAVING count(*) > 1)",
    # What was handled is what was taken from the broker less what was put back; the rest of that had no effect.
    "duplicates_dropped": """
        SELECT (SELECT count(*) FROM broker.kombu_message WHERE NOT visible) - (SELECT count(*) FROM put_back)
             - (SELECT count(*) FROM shipments)""",
    "lost": "SELECT count(*) FROM orders WHERE id NOT IN (SELECT order_id FROM shipments)",
    "shipped_twice": "SELECT count(*) FROM (SELECT 1 FROM shipments GROUP BY order_id HAVING count(*) > 1)",
    "shipped_although_rolled_back": "SELECT count(DISTINCT order_id) FROM shipments WHERE order_id NOT IN (SELECT id FROM orders)",
    "left_in_the_outbox": "SELECT count(*) FROM outbox_message",
}
MUST_BE_ZERO = ("lost", "shipped_twice", "shipped_although_rolled_back", "left_in_the_outbox")


@dataclass(frozen=True, slots=True)
class Ledger:
    """What became of every order.

    `published_more_than_once` counts messages that came to the broker more than once, `duplicates_dropped` deliveries
    that were handled and had no effect.
    """

    orders_committed: int
    orders_rolled_back: int
    shipped: int
    published_more_than_once: int
    duplicates_dropped: int
    lost: int
    shipped_twice: int
    shipped_although_rolled_back: int
    left_in_the_outbox: int

    @property
    def wrong(self) -> tuple[str, ...]:
        """The lines that should be zero and are not."""
        return tuple(name for name in MUST_BE_ZERO if getattr(self, name))

    @property
    def lines(self) -> dict[str, int]:
        """Every line by its name, in the order in which it is shown."""
        return {field.name: getattr(self, field.name) for field in fields(self)}


def count(folder: Folder) -> Ledger:
    """Count the ledger of the demo in a folder; nothing may be running there."""
    with observing(folder) as connection:
        return Ledger(**{name: number(connection, query) for name, query in _QUERIES.items()})
