"""Which handler gets which topic."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

from outbox import topics
from outbox.errors import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Callable

    from outbox.inbox.message import Message

    Handler = Callable[[Any, Message], Any]


class Handlers:
    """Handlers by topic pattern, tried in the order in which they were added."""

    def __init__(self, *, is_async: bool) -> None:
        self.is_async = is_async
        self._by_pattern: dict[str, Handler] = {}

    @property
    def patterns(self) -> tuple[str, ...]:
        """All patterns, in order."""
        return tuple(self._by_pattern)

    def add(self, pattern: str, handler: Handler) -> None:
        """Add a handler. Raises `ConfigurationError` for a pattern that is malformed or taken."""
        if not topics.is_pattern(pattern):
            raise ConfigurationError(f"{pattern!r} is not a topic pattern; use words and dots, with * or # for words")
        if pattern in self._by_pattern:
            raise ConfigurationError(f"topic pattern {pattern!r} already has a handler")
        self._by_pattern[pattern] = handler

    def find(self, topic: str) -> Handler | None:
        """Return the first handler whose pattern selects the topic."""
        matching = (handler for pattern, handler in self._by_pattern.items() if topics.matches(pattern, topic))
        return next(matching, None)

    def check_kind(self, handler: Handler) -> None:
        """Raise `ConfigurationError` for a handler that is async where a plain one is needed, or the other way round."""
        call = getattr(handler, "__call__", None)  # noqa: B004 - an object whose __call__ is async
        if (inspect.iscoroutinefunction(handler) or inspect.iscoroutinefunction(call)) == self.is_async:
            return
        maker, wanted = ("async_sessionmaker", "async def") if self.is_async else ("sessionmaker", "a plain def")
        raise ConfigurationError(f"an inbox with this {maker} needs {wanted} for its handlers; {handler!r} is not")
