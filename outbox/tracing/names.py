"""The names that spans have: those of OpenTelemetry's semantic conventions 1.44.0, where messaging is still in development.

Source: docs/messaging in github.com/open-telemetry/semantic-conventions, v1.44.0. Only here, so that a later version is one change.
On one point ours differ: the destination is the topic, which all three sides know and of which there are few, and not
RabbitMQ's `{exchange}:{routing key}:{queue}`, which a producer of the outbox does not know.
"""

from __future__ import annotations

SCHEMA_URL = "https://opentelemetry.io/schemas/1.44.0"
SCOPE = "outbox"
"""The name of the tracer, by which a sampler or a processor can tell these spans."""

CREATE, SEND, PROCESS = "create", "send", "process"

SYSTEM = "messaging.system"
OPERATION_NAME = "messaging.operation.name"
OPERATION_TYPE = "messaging.operation.type"
DESTINATION = "messaging.destination.name"
MESSAGE_ID = "messaging.message.id"
BATCH_COUNT = "messaging.batch.message_count"
CONSUMER_GROUP = "messaging.consumer.group.name"
SERVER_ADDRESS = "server.address"
SERVER_PORT = "server.port"
ERROR_TYPE = "error.type"
OTHER_ERROR = "_OTHER"
"""The type of errors of several types."""

RESULT = "outbox.result"
"""Ours: what a delivery came to, `handled` or `duplicate`."""

OUTBOX = "outbox"
"""The messaging system of a message that is only in the database yet."""
RABBITMQ = "rabbitmq"
