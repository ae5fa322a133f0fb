"""What a message looks like on the wire: the names that the relay writes and consumers read."""

from __future__ import annotations

from enum import StrEnum

DEFAULT_EXCHANGE = "outbox"
"""The durable topic exchange that messages go to when no route says otherwise; the routing key is the topic."""

RESERVED_PREFIX = "outbox-"
"""Headers that begin so belong to the relay; an event may not set them."""

TOPIC_HEADER = "outbox-topic"
KEY_HEADER = "outbox-key"
DELIVERY_HEADER = "outbox-delivery"
"""Stays in the outbox, never on the wire: the destination of a message that has one of its own."""

TRACE_HEADERS = ("traceparent", "tracestate", "baggage")
"""The names that W3C Trace Context and W3C Baggage give to the trace that a message carries."""

CLOUD_EVENTS = ("cloudEvents_", "cloudEvents:", "ce-", "ce_")
"""How the bindings of CloudEvents begin the names of an event's attributes: AMQP has two ways, HTTP and Kafka one each."""

CLOUD_EVENTS_JSON = "application/cloudevents+json"
"""The content type of a CloudEvent that has everything in its body."""


class Format(StrEnum):
    """As what messages are published. The message id, and all headers of the first one, are the same in each."""

    OUTBOX = "outbox"  # the payload as it is, and a few headers
    CLOUDEVENTS = "cloudevents"  # a CloudEvent in binary mode: its attributes are headers too
    STRUCTURED = "cloudevents-structured"  # a CloudEvent in structured mode: the body is JSON with the payload inside
