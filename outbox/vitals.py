"""What the health of a process is judged by: whether it gets on, whether it has started, and what troubles it."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from outbox.progress import Progress

if TYPE_CHECKING:
    from outbox.progress import Hang


class Vitals:
    """Written by the loop of a relay or consumer, read by whoever answers for its health, from any thread.

    `limit_s`: after how many seconds without progress the loop hangs. `at_work` is set when the loop begins, `started` when
    it has succeeded for the first time.
    """

    def __init__(self, *, limit_s: float, progress: Progress | None = None) -> None:
        self.limit_s = limit_s
        self.progress = progress or Progress()
        self.at_work = threading.Event()
        self.started = threading.Event()
        self._troubles: dict[str, str] = {}

    def hung(self) -> Hang | None:
        """Return what hangs; None when all is well."""
        return self.progress.hung(self.limit_s)

    def trouble(self, part: str, what: str | None) -> None:
        """Note how a part that can be done without for a while is not as it should be; None: it is well again."""
        if self._troubles.get(part) != what:  # replaced, not changed: others may be reading it
            others = {name: trouble for name, trouble in self._troubles.items() if name != part}
            self._troubles = others if what is None else {**others, part: what}

    @property
    def troubles(self) -> dict[str, str]:
        """What is in trouble, and how."""
        return dict(self._troubles)
