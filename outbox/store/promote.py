"""Promotion: messages whose time has come become deliverable."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

import sqlalchemy as sa

from outbox.sqltypes import now
from outbox.states import State

if TYPE_CHECKING:
    from outbox.tables import Tables


def promote(connection: sa.Connection, tables: Tables, *, most: int) -> int:
    """Make up to `most` due messages pending, the longest due first; return how many.

    Walks `outbox_message_scheduled_ix` from its start, so a million messages that are not due cost nothing. Skips rows
    that another relay is promoting at this moment. Needs no lease: no relay holds a message that is scheduled.
    """
    return connection.execute(_promote(tables), {"most": most}).rowcount


@lru_cache
def _promote(tables: Tables) -> sa.Update:
    message = tables.message
    due = (
        sa.select(message.c.id)
        .where(message.c.state == sa.literal_column(f"'{State.SCHEDULED}'"), message.c.available_at <= now())
        .order_by(message.c.available_at)
        .limit(sa.bindparam("most", type_=sa.Integer))
        .with_for_update(skip_locked=True)
        .cte("due")
    )
    deliverable = {"state": State.PENDING, "holds": False, "again": message.c.partition}
    return sa.update(message).where(message.c.id.in_(sa.select(due.c.id))).values(deliverable)
