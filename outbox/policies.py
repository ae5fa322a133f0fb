"""Which retry policy a topic has."""

from __future__ import annotations

from dataclasses import dataclass, field

from outbox.states import RetryPolicy
from outbox.topics import matches


@dataclass(frozen=True, slots=True)
class Policies:
    """Retry policies by topic pattern, first match wins; `default` for all other topics."""

    default: RetryPolicy = field(default_factory=RetryPolicy)
    by_topic: tuple[tuple[str, RetryPolicy], ...] = ()

    def of(self, topic: str) -> RetryPolicy:
        """Return the policy of a topic."""
        if not self.by_topic:
            return self.default
        return next((policy for pattern, policy in self.by_topic if matches(pattern, topic)), self.default)
