"""Publishes a batch in two parts: the second must wait until what was published before is settled."""

from __future__ import annotations

from typing import TYPE_CHECKING

from outbox.publishers.base import Published
from outbox.states import Outcome, Verdict

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from outbox.outgoing import Outgoing
    from outbox.publishers.base import Control, Publisher

_STOPPED = (Outcome.UNSENT, Outcome.UNKNOWN)


def publish(
    publisher: Publisher, rows: Sequence[Outgoing], control: Control, *, room: int, go_on: Callable[[], bool]
) -> Published:
    """Publish the first `room` rows, and when `go_on` says so the others; the same comes of it as of one publish.

    A key of which a message has failed in the first part is held in the second. Nothing more is sent after a stop, or a loss.
    """
    begun = publisher.publish(rows[:room], control)
    rest = rows[room:]
    if not rest:
        return begun
    stopped = begun.lost is not None or any(verdict.outcome in _STOPPED for verdict in begun.verdicts.values())
    if stopped or not go_on():
        return Published(begun.verdicts | _all(rest, Outcome.UNSENT), begun.lost)
    failed = {row.key for row in rows[:room] if begun.verdicts[row.id].outcome is not Outcome.CONFIRMED} - {None}
    held = [row for row in rest if row.key in failed]
    ended = publisher.publish([row for row in rest if row.key not in failed], control)
    return Published(begun.verdicts | _all(held, Outcome.HELD) | ended.verdicts, ended.lost)


def _all(rows: Sequence[Outgoing], outcome: Outcome) -> dict[int, Verdict]:
    return {row.id: Verdict(outcome) for row in rows}
