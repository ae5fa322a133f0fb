"""Whether a process is ready: its check is asked seldom, and not waited for for long."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from outbox.seldom import Seldom

if TYPE_CHECKING:
    from collections.abc import Callable

KEEP_S = 1.0
LIMIT_S = 2.0


class Readiness:
    """Runs `check`, which raises what is wrong, in a thread of its own, and tells what became of it.

    However many ask at once: one check at a time, and none within `keep_s` seconds of the last one's end. Nobody waits for
    longer than `limit_s`; a check that hangs is not started again.
    """

    def __init__(
        self,
        check: Callable[[], None],
        *,
        limit_s: float = LIMIT_S,
        keep_s: float = KEEP_S,
        seconds: Callable[[], float] = time.monotonic,
    ) -> None:
        self._check = Seldom(check, name="outbox-readiness", limit_s=limit_s, keep_s=keep_s, seconds=seconds)

    def problem(self) -> str | None:
        """Return in one line what is wrong; None when all is well."""
        answer = self._check.answer()
        if answer.waiting_s is not None:
            return f"no answer for {answer.waiting_s:.1f} s"
        return None if answer.error is None else _one_line(answer.error)


def _one_line(error: Exception) -> str:
    """Return the first paragraph of an error on one line: a remedy that follows it is for the log."""
    return " ".join(str(error).strip().partition("\n\n")[0].split()) or type(error).__name__
