"""Addresses that lead nowhere: of the messages for one, a batch tries a single one first, which tells for all."""

from __future__ import annotations

from typing import TYPE_CHECKING

from outbox.publishers.wire_message import address

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from outbox.outgoing import Outgoing
    from outbox.publishers.flight import Address
    from outbox.routes import Routes
    from outbox.states import Verdict

UNROUTABLE = "Unroutable"
"""The error class of a message that came back because no queue is bound for it."""

_MOST_KNOWN = 1000
_ROUTING_HEADERS = ("CC", "BCC")  # RabbitMQ's "sender-selected distribution"


class DeadEnds:
    """Remembers them until a message for one gets through.

    A missing binding fails every message of its topic. Tried each by itself, they come back whole, and cost the good ones of the
    batch a multiple of what these cost. Only where the routing key alone decides: of others each is tried.
    """

    def __init__(self, routes: Routes) -> None:
        self._routes = routes
        self._known: dict[Address, None] = {}

    def at(self, row: Outgoing, place: Address) -> bool:
        """Tell whether the last message for this address came back, and this one would too."""
        return place in self._known and self._by_key_alone(row)

    def answered(self, rows: Iterable[Outgoing], verdicts: Mapping[int, Verdict], *, through: Iterable[Address]) -> None:
        """Note what came back, and through which of the addresses a message got."""
        for place in through:
            self._known.pop(place, None)
        back = (row for row in rows if verdicts[row.id].error_class == UNROUTABLE)
        self._known.update((address(row, self._routes), None) for row in back if self._by_key_alone(row))
        while len(self._known) > _MOST_KNOWN:
            del self._known[next(iter(self._known))]

    def _by_key_alone(self, row: Outgoing) -> bool:
        if row.delivery is not None or self._routes.of(row.topic).exchange_type == "headers":
            return False
        return row.headers is None or not any(name in row.headers for name in _ROUTING_HEADERS)
