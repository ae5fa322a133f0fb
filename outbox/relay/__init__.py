"""The relay: claims committed messages, publishes them, and settles what became of them."""

from outbox.relay.loop import Relay
from outbox.relay.transactions import Transactions

__all__ = ["Relay", "Transactions"]
