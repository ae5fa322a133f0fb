"""The relay's settings: built once, checked once, passed down."""

from __future__ import annotations

import math
import os
import secrets
import socket
from dataclasses import dataclass, field

from outbox.errors import ConfigurationError
from outbox.routes import Routes
from outbox.states import RetryPolicy

_SETTLE_MARGIN_S = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RelaySettings:
    """Everything that a relay can be told. Times in seconds. Raises `ConfigurationError` for what cannot work.

    `lease_s`: how long a relay may hold a partition without hearing from the broker. `confirm_timeout_s`: how long the
    broker may be silent with messages in flight before the connection counts as lost; must be shorter than the lease.
    `poll_interval_s`: the longest pause between two looks at an empty table. `batch_size`: messages claimed at once.
    `grace_s`: after SIGTERM, how long to wait for confirms and for the database. `policy`: for messages that fail by
    their own fault.
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
    policy: RetryPolicy = field(default_factory=RetryPolicy)
    allow_unconfirmed: bool = False
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
                f"lease ({self.lease_s:g} s) must be at least {_SETTLE_MARGIN_S:g} s longer than confirm-timeout "
                f"({self.confirm_timeout_s:g} s), or another relay publishes what this one is still waiting for"
            )
            raise ConfigurationError(message)
