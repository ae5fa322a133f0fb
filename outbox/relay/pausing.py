"""Which claimed messages may go out, and which must wait because of a pause or of an earlier message of their key."""

from __future__ import annotations

from typing import TYPE_CHECKING

from outbox.topics import matches

if TYPE_CHECKING:
    from collections.abc import Sequence

    from outbox.outgoing import Outgoing


def divide(rows: Sequence[Outgoing], paused: Sequence[str]) -> tuple[list[Outgoing], list[Outgoing]]:
    """Return, of rows in id order, those that may go out and those that must wait; `paused` are patterns of topics.

    A message that waits makes the later ones of its key wait, in whatever topic they are: so the order per key holds.
    """
    if not paused and all(row.held_id is None for row in rows):
        return list(rows), []  # as nearly always
    free: list[Outgoing] = []
    waiting: list[Outgoing] = []
    held: set[str] = set()
    for row in rows:
        if row.must_wait or row.key in held or any(matches(pattern, row.topic) for pattern in paused):
            waiting.append(row)
            if row.key is not None:
                held.add(row.key)
        else:
            free.append(row)
    return free, waiting
