"""Payloads and headers: what a relay reads of them at once has to fit in its memory, whatever their sizes.

Small ones come with their rows. Large ones, rare as they are, are read afterwards, when their sizes are known: so the usual
claim is still one statement.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import sqlalchemy as sa

from outbox.outgoing import MOST_HEADERS_BYTES
from outbox.sqltypes import JsonText, json_bytes
from outbox.store.dialects import is_in

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from outbox.outgoing import Outgoing
    from outbox.tables import Tables

MOST_BYTES = 12_000_000
"""How much payload is read at once, unless a single message is larger. While it is read it takes up to four times the memory (m)."""

SMALL_BYTES = 4000
"""Up to this size a payload comes with its row: a batch of them, or the four batches that a claim may read, is no burden."""


def payload_if_small(message: sa.FromClause) -> sa.ColumnElement[Any]:
    """Return the column `payload`, which is NULL for a large one. PostgreSQL finds the size of one without reading it."""
    small = sa.bindparam("small_bytes", callable_=lambda: SMALL_BYTES, type_=sa.Integer)
    return sa.case((sa.func.length(message.c.payload) <= small, message.c.payload)).label("payload")


def headers_if_sendable(message: sa.FromClause) -> sa.ColumnElement[Any]:
    """Return the column `headers`, which is NULL where nobody could send them."""
    text = sa.cast(message.c.headers, JsonText())
    return sa.case((json_bytes(message.c.headers) <= MOST_HEADERS_BYTES, text)).label("headers")


def with_large_payloads(connection: sa.Connection, tables: Tables, rows: list[Outgoing]) -> list[Outgoing]:
    """Return the first ones of these rows, as many as fit into `MOST_BYTES` and at least one, all with their payloads.

    Looks large ones up by `outbox_message_pk`, twice: their sizes, then those that fit. Nobody changes a message whose partition
    is leased, so they are all there.
    """
    without = [row.id for row in rows if _left_out(row)]
    if not without:
        return rows
    id_, payload = tables.message.c.id, tables.message.c.payload
    sizes = _by_id(connection, sa.select(id_, sa.func.length(payload)).where(is_in(connection, id_, without)))
    fitting = _fitting(rows, sizes)
    wanted = [row.id for row in fitting if _left_out(row)]
    payloads = _by_id(connection, sa.select(id_, payload).where(is_in(connection, id_, wanted)))
    return [row._replace(payload=payloads[row.id]) if row.id in payloads else row for row in fitting]


def _left_out(row: Any) -> bool:
    return row.payload is None


def _fitting(rows: list[Outgoing], sizes: Mapping[int, int]) -> list[Outgoing]:
    total = 0
    for place, row in enumerate(rows):
        total += sizes.get(row.id) or len(row.payload)
        if place and total > MOST_BYTES:
            return rows[:place]
    return rows


def _by_id(connection: sa.Connection, query: sa.Select[Any]) -> dict[int, Any]:
    found: Sequence[Any] = connection.execute(query).all()
    return {row[0]: row[1] for row in found}
