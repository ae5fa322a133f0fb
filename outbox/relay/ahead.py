"""Claims the next batch while one is published: the broker does not wait for the database."""

from __future__ import annotations

import logging
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

from sqlalchemy.exc import SQLAlchemyError

if TYPE_CHECKING:
    from collections.abc import Callable
    from concurrent.futures import Future

    from outbox.relay.batch import Batch

log = logging.getLogger("outbox.relay")


class Ahead:
    """At most one claim under way, in a thread of its own.

    What it claims is in other partitions than what is being published, whose leases are taken: no message is in both. Its own
    leases run meanwhile, and are renewed only when its turn has come; so a publish that takes long loses them.
    """

    def __init__(self, claim: Callable[[], Batch | None]) -> None:
        self._claim = claim
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="outbox-claim")
        self._claiming: Future[Batch | None] | None = None

    def begin(self) -> None:
        """Begin to claim; `take` before beginning again, and before anything else is done with `Transactions`."""
        self._claiming = self._executor.submit(self._claim)

    def take(self) -> Batch | None:
        """Return what was claimed. `None` too when the database did not answer: the next claim will meet it again."""
        claiming, self._claiming = self._claiming, None
        if claiming is None:
            return None
        try:
            return claiming.result()
        except SQLAlchemyError as error:
            log.debug("nothing claimed ahead", extra={"error": str(error).partition("\n")[0]})
            return None

    def close(self) -> None:
        """End the thread."""
        self._executor.shutdown()
