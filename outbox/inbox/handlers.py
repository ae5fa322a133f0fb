"""Which handler gets which topic, what a second execution of it would mean, and what a failure of it leads to."""

from __future__ import annotations

import inspect
import math
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Any, TypedDict

from outbox import topics
from outbox.errors import ConfigurationError
from outbox.states import OnDead, RetryPolicy

if TYPE_CHECKING:
    from collections.abc import Callable

    from outbox.inbox.message import Message

    Handler = Callable[[Any, Message], Any]


class Mode(StrEnum):
    """What keeps a second execution of a handler from having a second effect."""

    TRANSACTIONAL = "transactional"  # its effects are in the database, in one transaction with the record of the message
    LEASED = "leased"  # its effects are elsewhere: a lease, a fencing token, and an idempotency key for the other system
    IDEMPOTENT = "idempotent"  # nothing does: to repeat it changes nothing, for the reason that was given


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """What happens to a message whose handler fails or hangs. Times in seconds.

    An exception of one of the classes in `permanent` is never tried again, nor is a validation error (`Permanent`,
    pydantic's `ValidationError`, JSON that is none). With `retry_on`, only exceptions of these classes are tried again;
    without, all others are. `retry` says how often and how far apart. After `soft_limit_s` the handler gets a
    `TimeLimitExceeded`; after `time_limit_s` its thread is given up, its transaction can no longer commit, and the
    message counts as failed. A leased handler holds its message for `lease_s` at a time, and keeps it no longer than it
    makes progress within `time_limit_s`.
    """

    retry: RetryPolicy = field(default_factory=RetryPolicy)
    retry_on: tuple[type[BaseException], ...] = ()
    permanent: tuple[type[BaseException], ...] = ()
    soft_limit_s: float | None = None
    time_limit_s: float = 300.0
    lease_s: float = 60.0

    def __post_init__(self) -> None:
        for name in ("time_limit_s", "soft_limit_s", "lease_s"):
            seconds = getattr(self, name)
            if seconds is not None and not 0 < seconds < math.inf:
                raise ConfigurationError(f"{name} must be a number of seconds, more than zero, not {seconds}")
        if self.soft_limit_s is not None and self.soft_limit_s > self.time_limit_s:
            raise ConfigurationError(
                "soft_limit_s must not be longer than time_limit_s, after which the handler is given up: "
                f"{self.soft_limit_s:g} s > {self.time_limit_s:g} s"
            )
        if self.retry.on_dead not in (OnDead.BLOCK, OnDead.SKIP):
            raise ConfigurationError(f"on_dead is {self.retry.on_dead!r}; a consumer knows 'block' and 'skip'")


@dataclass(frozen=True, slots=True, kw_only=True)
class Handling:
    """One registered handler. `because` is the reason that an idempotent one gave."""

    pattern: str
    handler: Handler
    mode: Mode
    rules: Rules
    because: str | None = None


class RuleOptions(TypedDict, total=False):
    """The parts of `Rules`, as a decorator takes them."""

    retry: RetryPolicy
    retry_on: tuple[type[BaseException], ...]
    permanent: tuple[type[BaseException], ...]
    soft_limit_s: float | None
    time_limit_s: float
    lease_s: float


class Handlers:
    """Handlers by topic pattern, tried in the order in which they were added."""

    def __init__(self, *, is_async: bool) -> None:
        self.is_async = is_async
        self._by_pattern: dict[str, Handling] = {}

    @property
    def patterns(self) -> tuple[str, ...]:
        """All patterns, in order."""
        return tuple(self._by_pattern)

    def __iter__(self) -> Any:
        return iter(self._by_pattern.values())

    def add(self, handling: Handling) -> None:
        """Add a handler. Raises `ConfigurationError` for a pattern that is malformed or taken."""
        pattern = handling.pattern
        if not topics.is_pattern(pattern):
            raise ConfigurationError(f"{pattern!r} is not a topic pattern; use words and dots, with * or # for words")
        if pattern in self._by_pattern:
            raise ConfigurationError(f"topic pattern {pattern!r} already has a handler")
        self._by_pattern[pattern] = handling

    def find(self, topic: str) -> Handling | None:
        """Return the first handler whose pattern selects the topic."""
        matching = (handling for pattern, handling in self._by_pattern.items() if topics.matches(pattern, topic))
        return next(matching, None)

    def check_kind(self, handler: Handler) -> None:
        """Raise `ConfigurationError` for a handler that is async where a plain one is needed, or the other way round."""
        call = getattr(handler, "__call__", None)  # noqa: B004 - an object whose __call__ is async
        if (inspect.iscoroutinefunction(handler) or inspect.iscoroutinefunction(call)) == self.is_async:
            return
        maker, wanted = ("async_sessionmaker", "async def") if self.is_async else ("sessionmaker", "a plain def")
        raise ConfigurationError(f"an inbox with this {maker} needs {wanted} for its handlers; {handler!r} is not")
