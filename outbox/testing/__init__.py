"""For the tests of applications: what was enqueued, a relay without a broker, and handlers under every kind of redelivery."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from outbox.testing.calls import Answer, Call
    from outbox.testing.committed import assert_committed
    from outbox.testing.draining import drain
    from outbox.testing.events import Enqueued, assert_enqueued, enqueued, refute_enqueued
    from outbox.testing.redelivery import Redelivered, redeliver
    from outbox.testing.scenarios import Scenario

__all__ = [
    "Answer",
    "Call",
    "Enqueued",
    "Redelivered",
    "Scenario",
    "assert_committed",
    "assert_enqueued",
    "drain",
    "enqueued",
    "redeliver",
    "refute_enqueued",
]

# pytest loads this package with its plugin in every run, also where nobody uses it.
_HOMES = {
    "Answer": "calls",
    "Call": "calls",
    "Enqueued": "events",
    "Redelivered": "redelivery",
    "Scenario": "scenarios",
    "assert_committed": "committed",
    "assert_enqueued": "events",
    "drain": "draining",
    "enqueued": "events",
    "redeliver": "redelivery",
    "refute_enqueued": "events",
}

if not TYPE_CHECKING:  # or a type checker would believe in any name

    def __getattr__(name: str) -> Any:
        """Load each name from its module when it is asked for."""
        if name in _HOMES:
            return getattr(import_module(f"outbox.testing.{_HOMES[name]}"), name)
        raise AttributeError(f"module 'outbox.testing' has no attribute {name!r}")
