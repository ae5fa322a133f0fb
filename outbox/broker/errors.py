"""What kombu and py-amqp raise, sorted by what it means for us."""

from __future__ import annotations

from amqp.exceptions import AccessRefused, AMQPError, ChannelError, ConnectionForced, NotAllowed, NotFound, PreconditionFailed
from kombu.exceptions import KombuError

from outbox.broker.tls import ended, refusal
from outbox.errors import BrokerRefused, BrokerUnavailable

# kombu's own source: py-amqp sometimes raises AttributeError when the connection is lost.
LOST = (AMQPError, KombuError, OSError, AttributeError)
"""The connection is lost or cannot be had. Virtual transports have errors of their own besides."""

REFUSED = (AccessRefused, NotAllowed, NotFound, PreconditionFailed)
"""The broker answered and said no: trying again helps only after somebody has changed something."""

CHANNEL_CLOSED = (ChannelError,)
"""The broker closed one channel: something that was sent on it is wrong."""


def is_unexplained(error: BaseException) -> bool:
    """Tell whether the connection broke without a reason that has nothing to do with what was sent.

    Such reasons are an operator's (320: a shutdown, maintenance), and our own impatience with a socket that stalls.
    """
    impatient = isinstance(error, TimeoutError) and error.errno is None
    return not impatient and not isinstance(error, ConnectionForced)


def describe(error: BaseException) -> str:
    """Return one line that says what the broker said, without a password."""
    code, text = getattr(error, "reply_code", None), getattr(error, "reply_text", None)
    if (problem := ended(error)) is not None:
        return f"broker: {problem}"
    said = f"{code} {text}" if code and text else str(error).strip().partition("\n")[0] or type(error).__name__
    return f"broker: {said}"


def failure(error: BaseException) -> BrokerUnavailable:
    """Return our error for one of `LOST` or of a transport: refused, where trying again cannot help, else unavailable."""
    if (problem := refusal(error)) is not None:
        return BrokerRefused(f"broker: {problem}")
    return (BrokerRefused if isinstance(error, REFUSED) else BrokerUnavailable)(describe(error))
