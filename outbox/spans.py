"""For how long a relay may publish a message again, which is how long an inbox must at least remember it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from outbox.policies import Policies
    from outbox.states import RetryPolicy


@dataclass(frozen=True, slots=True)
class Span:
    """The longest time between two publishes of one message that its own failures can lead to, and its parts, in seconds.

    `topics` is the pattern of the policy that allows it, or `None` for the default. Not in it: how long the relay, the
    database or the broker may be down in between, and what an operator publishes again.
    """

    retries_s: float
    lease_s: float
    polls_s: float
    topics: str | None

    @property
    def total_s(self) -> float:
        """The whole of it."""
        return self.retries_s + self.lease_s + self.polls_s

    def __str__(self) -> str:
        whose = "by default" if self.topics is None else f"for topics {self.topics}"
        return (
            f"{self.total_s:g} s, of which {self.retries_s:g} s are for retries ({whose}), {self.lease_s:g} s for the lease and "
            f"{self.polls_s:g} s for the polls in between"
        )


def redelivery_span(policies: Policies, *, lease_s: float, poll_interval_s: float) -> Span:
    """Return the longest span of all policies.

    It begins with a publish whose confirm was lost, ends with the publish after the last delay, and has the lease of a relay
    that was killed in it. The end of the lease, and that of each delay, is noticed up to a poll interval late.
    """
    every: list[tuple[str | None, RetryPolicy]] = [(None, policies.default), *policies.by_topic]
    spans = (Span(retries_s(policy), lease_s, policy.max_attempts * poll_interval_s, topics) for topics, policy in every)
    return max(spans, key=lambda span: span.total_s)


def retries_s(policy: RetryPolicy) -> float:
    """Return the longest time from a message's first try to its last, in seconds.

    A message younger than the maximum age at a failure gets one more delay, and is tried once more after it.
    """
    delays = policy.max_attempts - 1
    total = policy.backoff.total_s(delays)
    if policy.max_age_s is None or not delays:
        return total
    return min(total, policy.max_age_s + policy.backoff.bound_s(delays))
