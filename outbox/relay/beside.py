"""Works on the database while a batch is published, so that neither the broker nor the database waits for the other."""

from __future__ import annotations

import logging
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

from sqlalchemy.exc import SQLAlchemyError

if TYPE_CHECKING:
    from collections.abc import Callable
    from concurrent.futures import Future

    from outbox.relay.batch import Delivered
    from outbox.relay.transactions import TurnedOver

log = logging.getLogger("outbox.relay")


class Beside:
    """At most one transaction under way in a thread of its own: it settles the last batch, and claims the next.

    What it claims is in other partitions than what is being published, whose leases are taken: no message is in both. Its own
    leases run meanwhile, and are renewed only when its turn has come; so a publish that takes long loses them.
    """

    def __init__(self, turn_over: Callable[[Delivered | None], TurnedOver]) -> None:
        self._turn_over = turn_over
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="outbox-database")
        self._under_way: Future[TurnedOver] | None = None

    def begin(self, last: Delivered | None) -> None:
        """Begin; `take` before beginning again, and before anything else is done with `Transactions` but renewing leases."""
        self._under_way = self._executor.submit(self._turn_over, last)

    def take(self) -> TurnedOver | None:
        """Wait for it, and return what it has done. `None` if nothing was begun, or the database failed: then nothing is done."""
        under_way, self._under_way = self._under_way, None
        if under_way is None:
            return None
        try:
            return under_way.result()
        except SQLAlchemyError as error:
            log.debug("nothing done beside the publish", extra={"error": str(error).partition("\n")[0]})
            return None

    def close(self) -> None:
        """End the thread."""
        self._executor.shutdown()
