"""`forget`: deletes old records of handled messages, for consumers with a database that no relay cleans up."""

from __future__ import annotations

from typing import TYPE_CHECKING

from outbox.errors import ConfigurationError
from outbox.inbox.dedup import checked
from outbox.store.retention import expire_processed
from outbox.tables import DEFAULT

if TYPE_CHECKING:
    from datetime import timedelta

    from sqlalchemy import Connection

    from outbox.tables import Tables


def forget(connection: Connection, consumer: str, older_than: timedelta, most: int = 5000, *, tables: Tables = DEFAULT) -> int:
    """Delete up to `most` records of messages that `consumer` handled longer ago than `older_than`; return how many.

        deleted = 5000
        while deleted == 5000:                                        # from a cron job
            with engine.begin() as connection:
                deleted = forget(connection, "shipping", timedelta(days=30))

    It commits nothing: give every batch a transaction of its own. It waits for no lock, so any number of them may run beside
    each other and beside consumers. A batch walks the records of all consumers from the oldest on; where several with
    different times share a table it passes those that others still keep.

    Not guaranteed any longer for a forgotten message: that it is handled once. `older_than` must exceed every time after
    which a message may be delivered again: all retries of the relay (an hour by default) and its longest outage, the longest stay
    in a queue or a dead-letter queue, and the time after which an operator publishes a dead message again.

    Raises `ConfigurationError` when `older_than` or `most` is not more than zero, and `InvalidMessageId` for an unusable name.
    """
    if older_than.total_seconds() <= 0 or most <= 0:
        raise ConfigurationError(f"older_than and most must be more than zero, not {older_than} and {most}")
    whose = checked("consumer", consumer)
    return expire_processed(
        connection, tables, older_than_s=older_than.total_seconds(), since=None, most=most, consumer=whose
    ).count
