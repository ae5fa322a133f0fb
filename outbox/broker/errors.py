"""What kombu and py-amqp raise, sorted by what it means for us."""

from __future__ import annotations

from amqp.exceptions import AccessRefused, AMQPError, ChannelError, NotAllowed, NotFound, PreconditionFailed
from kombu.exceptions import KombuError

# kombu's own source: py-amqp sometimes raises AttributeError when the connection is lost.
LOST = (AMQPError, KombuError, OSError, AttributeError)
"""The connection is lost or cannot be had. Virtual transports have errors of their own besides."""

REFUSED = (AccessRefused, NotAllowed, NotFound, PreconditionFailed)
"""The broker answered and said no: trying again helps only after somebody has changed something."""

CHANNEL_CLOSED = (ChannelError,)
"""The broker closed one channel: something that was sent on it is wrong."""


def describe(error: BaseException) -> str:
    """Return one line that says what the broker said, without a password."""
    code, text = getattr(error, "reply_code", None), getattr(error, "reply_text", None)
    said = f"{code} {text}" if code and text else str(error).strip().partition("\n")[0] or type(error).__name__
    return f"broker: {said}"
