"""What a message looks like on the wire: the names that the relay writes and consumers read."""

from __future__ import annotations

DEFAULT_EXCHANGE = "outbox"
"""The durable topic exchange that messages go to when no route says otherwise; the routing key is the topic."""

RESERVED_PREFIX = "outbox-"
"""Headers that begin so belong to the relay; an event may not set them."""

TOPIC_HEADER = "outbox-topic"
KEY_HEADER = "outbox-key"
DELIVERY_HEADER = "outbox-delivery"
"""Stays in the outbox, never on the wire: the destination of a message that has one of its own."""
