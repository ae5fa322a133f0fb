"""Whether the connections that a consumer opens at once find room in the pool of its inbox's engine."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sqlalchemy.pool import QueuePool

from outbox.errors import ConfigurationError
from outbox.targets import bind_of

if TYPE_CHECKING:
    from outbox.inbox.inbox import Inbox

BESIDES = 2
"""What a consumer needs beside one for each worker: one to claim what has failed and is due, one for the answer to a probe."""


def require_room(inbox: Inbox, *, workers: int) -> None:
    """Raise `ConfigurationError` for a pool that is too small: a handler that waits in vain for a connection counts as failed.

    Nothing is said of other kinds of pools, nor of sessions that have no engine yet.
    """
    try:
        pool = bind_of(inbox.sessions, inbox.tables).pool
    except ConfigurationError:
        return
    most = _most(pool) if isinstance(pool, QueuePool) else None
    needed = workers + BESIDES
    if most is not None and most < needed:
        raise ConfigurationError(
            f"{workers} workers need {workers} + {BESIDES} = {needed} connections at once, and the pool of the inbox's engine has room "
            f"for {most}: give it create_engine(..., pool_size={needed}), or use fewer workers"
        )


def _most(pool: QueuePool) -> int | None:
    """Return how many connections a pool hands out at once; None for one without a bound."""
    overflow: int = pool._max_overflow  # noqa: SLF001 - there is no public name for it
    return None if overflow < 0 or pool.size() == 0 else pool.size() + overflow
