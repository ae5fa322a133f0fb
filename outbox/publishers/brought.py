"""Queues that messages bring along, to be declared before them: once per connection."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import kombu

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from outbox.outgoing import Outgoing


class BroughtQueues:
    """Remembers what was declared on one connection."""

    def __init__(self) -> None:
        self._declared: set[str] = set()

    def missing(self, rows: Sequence[Outgoing]) -> Iterator[kombu.Queue]:
        """Yield what is to be declared; what a message needs that has failed before is declared again, as it may be gone."""
        for row in rows:
            for queue in _brought_by(row):
                name = json.dumps(queue, sort_keys=True)
                if name not in self._declared or row.attempts:
                    self._declared.add(name)
                    yield _queue(queue)


def _brought_by(row: Outgoing) -> Sequence[Mapping[str, Any]]:
    try:
        return row.delivery.queues if row.delivery else ()
    except TypeError:  # reported when its turn comes to be sent
        return ()


def _queue(options: Mapping[str, Any]) -> kombu.Queue:
    exchange = kombu.Exchange(**options.get("exchange", {}))
    bindings = [
        kombu.binding(kombu.Exchange(**each["exchange"]), **{name: each[name] for name in each if name != "exchange"})
        for each in options.get("bindings", ())
    ]
    return kombu.Queue(**{**options, "exchange": exchange, "bindings": bindings})
