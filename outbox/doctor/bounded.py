"""Waits for an answer, but not for longer than a limit: a server that hangs must not hang whoever asks after its health."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

from outbox.seldom import Seldom

if TYPE_CHECKING:
    from collections.abc import Callable

T = TypeVar("T")


class NoAnswer(Exception):
    """There was none in time. Whoever was asked may still be waited for, in a thread that does not keep the process alive."""


def bounded(work: Callable[[], T], limit_s: float) -> T:
    """Return what `work` returns, or raise what it raises; `NoAnswer` if it takes longer than `limit_s` seconds."""
    answer = Seldom(work, name="outbox-doctor", limit_s=limit_s, keep_s=0.0).answer()
    if answer.waiting_s is not None:
        raise NoAnswer
    if answer.error is not None:
        raise answer.error
    return answer.value  # type: ignore[return-value]  # what work has returned
