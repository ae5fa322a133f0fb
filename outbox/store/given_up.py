"""The dead letters of consumers: giving them another chance, or up for good. What finds them is in `outbox.store.dead`.

Who changes some first takes turns with others that do (`take_turns`), so that no two of them leave a key of which each takes
the other's message for what it waits for. Then it locks their rows, which keeps consumers from letting a message wait behind
one that is just being discarded.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import sqlalchemy as sa

from outbox.sqltypes import now
from outbox.store.dead import selected
from outbox.store.dialects import is_in

if TYPE_CHECKING:
    from collections.abc import Collection

    from outbox.store.dead import Selection
    from outbox.tables import Tables


def retry(
    connection: sa.Connection, tables: Tables, selection: Selection, ids: Collection[int], *, ordered: bool
) -> tuple[int, set[str]]:
    """Let those of these messages that are still selected be tried as if they had never failed; return how many, and their keys.

    If `ordered`, those with a key wait, until `failed.unblock` frees the first of each. Their failures stay on record. Needs
    the locks of the rows. Looks the ids up in `failed_messages_dead_ix` or `_pk`.
    """
    failed = tables.failed
    waits = sa.and_(sa.literal(ordered), failed.c.key.is_not(None))
    state = sa.case((waits, sa.literal_column("'blocked'")), else_=sa.literal_column("'retry'"))
    afresh = {"state": state, "attempts": 0, "available_at": now(), "dead_at": None, "last_error": None, "error_class": None}
    retried = connection.execute(
        sa.update(failed)
        .where(is_in(connection, failed.c.id, ids), selected(tables, selection))
        .values(**afresh)
        .returning(failed.c.key)
    ).all()
    return len(retried), {row.key for row in retried if row.key is not None}


def discard(connection: sa.Connection, tables: Tables, selection: Selection, ids: Collection[int]) -> tuple[int, set[str]]:
    """Delete those of these messages that are still selected; return how many, and their keys. Finds rows like `retry`."""
    failed = tables.failed
    discarded = connection.execute(
        sa.delete(failed).where(is_in(connection, failed.c.id, ids), selected(tables, selection)).returning(failed.c.key)
    ).all()
    return len(discarded), {row.key for row in discarded if row.key is not None}


def hold_tried(connection: sa.Connection, tables: Tables, consumer: str, keys: Collection[str]) -> None:
    """Keep the messages of these keys that are being tried from coming to their end before this transaction does.

    Whoever ends one frees the next of its key, in a statement that then sees what this transaction has made wait. Waits for
    those that are ending now; they wait for nothing that this transaction has locked: they free what waited before. Walks
    `failed_messages_key_ix`.
    """
    failed = tables.failed
    tried = sa.select(failed.c.id).where(
        failed.c.consumer == consumer, is_in(connection, failed.c.key, keys), failed.c.state == sa.literal_column("'retry'")
    )
    connection.execute(tried.order_by(failed.c.key, failed.c.id).with_for_update(read=True)).all()


def held_back(connection: sa.Connection, tables: Tables, consumer: str, keys: Collection[str]) -> set[str]:
    """Return those of these keys of which messages wait. Walks `failed_messages_key_ix`; locks nothing."""
    failed = tables.failed
    waits = [failed.c.consumer == consumer, is_in(connection, failed.c.key, keys)]
    waits.append(failed.c.state == sa.literal_column("'blocked'"))
    return set(connection.execute(sa.select(failed.c.key).where(*waits).distinct()).scalars())
