"""Keeps metrics from growing without an end: topics come from applications, and some put an id into them."""

from __future__ import annotations

import threading

MOST = 100
OTHER = "_other_"


class Topics:
    """The label values for topics: the first hundred that come are kept, every other one is `_other_`. Thread safe."""

    def __init__(self, *, most: int = MOST) -> None:
        self._most = most
        self._known: set[str] = set()
        self._lock = threading.Lock()

    def __call__(self, topic: str) -> str:
        """Return the label value for a topic."""
        if topic in self._known:
            return topic
        with self._lock:
            if len(self._known) >= self._most:
                return OTHER
            self._known.add(topic)
        return topic
