"""Looks at the running demo from outside, to show it and to choose the moment of a kill."""

from __future__ import annotations

import sqlite3
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass

from outbox.demo.observer import number

_COUNTS = """
SELECT (SELECT count(*) FROM shipments), (SELECT count(*) FROM orders), (SELECT count(*) FROM refusals),
       (SELECT count(*) FROM broker.kombu_message WHERE visible)
"""


@dataclass(frozen=True, slots=True)
class View:
    """One look: numbers of orders and messages.

    `published` counts messages, `published_again` what came to the broker beyond the first time. `in_flight` is what the
    present relay has put into the broker and not yet settled in the outbox.
    """

    committed: int
    rolled_back: int
    in_outbox: int
    published: int
    published_again: int
    in_flight: int
    in_broker: int
    shipped: int

    @property
    def at_rest(self) -> bool:
        """Whether all that was committed has been published and taken by the consumer."""
        return self.in_outbox == self.in_broker == 0 and self.shipped >= self.committed


class Watch:
    """Remembers what it has seen in the broker, so that a look reads only what is new there."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._connection = connection
        self._last_id = 0
        self._seen: Counter[str] = Counter()
        self._by_this_relay: set[str] = set()

    @property
    def queue_is_there(self) -> bool:
        """Whether the consumer has declared its queue."""
        with suppress(sqlite3.OperationalError):  # kombu makes its tables when it is first used
            return number(self._connection, "SELECT count(*) FROM broker.kombu_queue") > 0
        return False

    def relay_starts(self) -> None:
        """Forget what an earlier relay had in flight."""
        self.look()
        self._by_this_relay.clear()

    def look(self) -> View:
        """Look at both databases."""
        # The broker first: what is in the outbox after it was seen in the broker is published and not settled.
        self._read_broker()
        unsettled = {row[0] for row in self._connection.execute("SELECT message_id FROM outbox_message")}
        shipped, committed, rolled_back, in_broker = self._connection.execute(_COUNTS).fetchone()
        return View(
            committed=committed,
            rolled_back=rolled_back,
            in_outbox=len(unsettled),
            published=len(self._seen),
            published_again=self._seen.total() - len(self._seen),
            in_flight=len(unsettled & self._by_this_relay),
            in_broker=in_broker,
            shipped=shipped,
        )

    def _read_broker(self) -> None:
        new = self._connection.execute("SELECT id, message_id FROM published WHERE id > ?", (self._last_id,))
        for self._last_id, message_id in new:
            self._seen[message_id] += 1
            self._by_this_relay.add(message_id)
