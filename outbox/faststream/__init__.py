"""FastStream on RabbitMQ: a middleware that lets each message have its effects once."""

from outbox.errors import MissingExtra

try:
    from outbox.faststream.middleware import InboxMessage, InboxMiddleware, InboxSession
except ImportError as missing:
    raise MissingExtra("this needs the package faststream; pip install 'outbox-relay[faststream]'") from missing

__all__ = ["InboxMessage", "InboxMiddleware", "InboxSession"]
