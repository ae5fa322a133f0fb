"""Waits for an answer, but not for longer than a limit: a server that hangs must not hang whoever asks after its health."""

from __future__ import annotations

import queue
import threading
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

T = TypeVar("T")


class NoAnswer(Exception):
    """There was none in time. Whoever was asked may still be waited for, in a thread that does not keep the process alive."""


def bounded(work: Callable[[], T], limit_s: float) -> T:
    """Return what `work` returns, or raise what it raises; `NoAnswer` if it takes longer than `limit_s` seconds."""
    answer: queue.SimpleQueue[tuple[T | None, Exception | None]] = queue.SimpleQueue()

    def run() -> None:
        try:
            answer.put((work(), None))
        except Exception as error:  # noqa: BLE001 - raised again by whoever waits
            answer.put((None, error))

    threading.Thread(target=run, name="outbox-doctor", daemon=True).start()
    try:
        found, error = answer.get(timeout=max(0.0, limit_s))
    except queue.Empty:
        raise NoAnswer from None
    if error is not None:
        raise error
    return found  # type: ignore[return-value]  # what work has returned
