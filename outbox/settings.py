"""The relay's settings: built once, checked once, passed down."""

from __future__ import annotations

import math
import os
import secrets
import socket
from dataclasses import dataclass, field

from outbox.errors import ConfigurationError
from outbox.policies import Policies
from outbox.routes import Routes
from outbox.spans import redelivery_span
from outbox.wakeaddress import Postgres, parse

MOST_AT_ONCE = 10_000
"""The largest batch: all of it is in memory, and settled in one transaction."""

_SETTLE_MARGIN_S = 5.0
_LONGEST_RETENTION_S = 100 * 365.25 * 86_400  # a time before which no database could count back


@dataclass(frozen=True, slots=True, kw_only=True)
class RelaySettings:
    """Everything that a relay can be told. Times in seconds. Raises `ConfigurationError` for what cannot work.

    `lease_s`: how long a relay may hold a partition without hearing from the broker. `confirm_timeout_s`: how long the
    broker may be silent with messages in flight before the connection counts as lost; must be shorter than the lease.
    `poll_interval_s`: the longest pause between two looks at an empty table. `batch_size`: messages claimed at
    once, at most 10,000.
    `grace_s`: after SIGTERM, how long to wait for confirms and for the database. `policies`: for messages that fail by
    their own fault. `retention_s`: how long to keep messages that were sent; `None` deletes them at once.

    `wake`: where to hear wake-ups of producers (`udp://127.0.0.1:7411`, `unix:///run/outbox/relay.sock`, or `postgres`, then from
    `wake_database_url`, or else from the relay's own database); `None` polls alone. One that is lost costs a poll interval.

    `inbox_retention_s`: how long to keep the records of handled messages in the relay's own database; `None` keeps them for
    ever. A message that is delivered again after that time is handled again. So it must be longer than the time over which
    this relay may publish a message again, which is checked, and also longer than any of these, which nobody can check here:
    an outage of the relay, the database or the broker; a message's stay in a queue or a dead-letter queue before it is
    delivered again; the time after which an operator retries a dead message or lets those behind it go on.
    """

    database_url: str
    broker_url: str
    schema: str | None = None
    routes: Routes = field(default_factory=Routes)
    lease_s: float = 30.0
    confirm_timeout_s: float = 20.0
    poll_interval_s: float = 0.5
    batch_size: int = 1000
    grace_s: float = 20.0
    policies: Policies = field(default_factory=Policies)
    retention_s: float | None = None
    inbox_retention_s: float | None = None
    allow_unconfirmed: bool = False
    wake: str | None = None
    wake_database_url: str | None = field(default=None, repr=False)
    owner: str = field(default_factory=lambda: f"{socket.gethostname()}:{os.getpid()}:{secrets.token_hex(3)}")

    def __post_init__(self) -> None:
        for name in ("lease_s", "confirm_timeout_s", "poll_interval_s", "batch_size"):
            if not 0 < getattr(self, name) < math.inf:
                message = (
                    f"{name.removesuffix('_s').replace('_', '-')} must be a number more than zero, not {getattr(self, name)}"
                )
                raise ConfigurationError(message)
        if not 0 <= self.grace_s < math.inf:
            message = f"grace must be a number of zero or more, not {self.grace_s}"
            raise ConfigurationError(message)
        if self.lease_s < self.confirm_timeout_s + _SETTLE_MARGIN_S:
            message = (
                f"lease must be at least {_SETTLE_MARGIN_S:g} s longer than confirm-timeout, or another relay publishes what this "
                f"one is still waiting for: {self.lease_s:g} s < {self.confirm_timeout_s:g} s + {_SETTLE_MARGIN_S:g} s"
            )
            raise ConfigurationError(message)
        if self.batch_size != int(self.batch_size) or self.batch_size > MOST_AT_ONCE:
            raise ConfigurationError(f"batch-size must be a whole number from 1 to {MOST_AT_ONCE}, not {self.batch_size:g}")
        self._check_wake()
        self._check_retention()

    def _check_wake(self) -> None:
        address = parse(self.wake) if self.wake is not None else None
        if self.wake_database_url is not None and not isinstance(address, Postgres):
            raise ConfigurationError("wake-database-url is only for wake = postgres; leave it out, or say so")

    def _check_retention(self) -> None:
        for name, value in (("retention", self.retention_s), ("inbox-retention", self.inbox_retention_s)):
            if value is not None and not 0 < value <= _LONGEST_RETENTION_S:
                message = f"{name} must be more than zero and at most 100 years, not {value:g} s; leave it out to have none"
                raise ConfigurationError(message)
        span = redelivery_span(self.policies, lease_s=self.lease_s, poll_interval_s=self.poll_interval_s)
        if self.inbox_retention_s is not None and self.inbox_retention_s <= span.total_s:
            message = (
                f"inbox-retention ({self.inbox_retention_s:g} s) must be longer than the time over which this relay may publish a "
                f"message again, or consumers handle it again: {span}"
            )
            raise ConfigurationError(message)
