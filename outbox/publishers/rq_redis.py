"""The Redis that RQ's queues are on: its address in a broker URL, and what its answers mean for a job."""

from __future__ import annotations

import re
from urllib.parse import parse_qsl, urlencode, urlsplit, urlunsplit

from outbox import urls
from outbox.broker import tls
from outbox.errors import BrokerRefused, BrokerUnavailable, ConfigurationError, MissingExtra
from outbox.rqjob import SCHEME

try:
    import redis
except ImportError as missing:
    raise MissingExtra("jobs for RQ need the package rq; pip install 'outbox-relay[rq]'") from missing

SERIALIZERS = ("pickle", "json")
SAID_NO = (redis.AuthenticationError, redis.exceptions.AuthorizationError, redis.exceptions.NoPermissionError)
"""Redis answered and refused us: trying again helps only after somebody has changed something."""

LOST = (redis.RedisError, OSError)
"""The connection is lost or cannot be had, or the server ails."""

_NOT_A_URL = "the broker URL cannot be read; expected rq+redis://user:password@host:6379/0, rq+rediss://... or rq+unix://..."
_CONNECT_TIMEOUT_S = 5
# What the server answers whatever the job is; redis-py takes the first word off where it has a class for it.
_AILING = (redis.OutOfMemoryError, redis.ReadOnlyError, redis.exceptions.ClusterError, redis.exceptions.NoScriptError)
_AILING_WORDS = re.compile(r"\b(OOM|MISCONF|READONLY|NOREPLICAS|MASTERDOWN|CLUSTERDOWN|LOADING|NOAUTH|BUSY)\b")


def dial(url: str, *, timeout_s: float) -> tuple[redis.Redis, str]:
    """Prepare a client, without connecting, and return it with the name of RQ's serializer. Raises `ConfigurationError`."""
    rest, options = tls.taken_from(urls.current(url))
    address, serializer = parts(rest)
    try:
        # Whether to try again is for the relay to say.
        client = redis.Redis.from_url(
            address,
            socket_connect_timeout=_CONNECT_TIMEOUT_S,
            socket_timeout=timeout_s,
            retry=redis.retry.Retry(redis.backoff.NoBackoff(), 0),
            **(tls.for_redis(options) if address.startswith("rediss://") else {}),
        )
    except ValueError as error:  # its text may hold a part of the password
        raise ConfigurationError(_NOT_A_URL) from error
    return client, serializer


def parts(url: str) -> tuple[str, str]:
    """Return the URL as redis-py takes it, and the name of RQ's serializer."""
    try:
        parts = urlsplit(url.removeprefix(SCHEME))
    except ValueError as error:
        raise ConfigurationError(_NOT_A_URL) from error
    query = dict(parse_qsl(parts.query))
    serializer = query.pop("serializer", SERIALIZERS[0])
    if parts.scheme not in {"redis", "rediss", "unix"}:
        raise ConfigurationError(_NOT_A_URL)
    if serializer not in SERIALIZERS:
        raise ConfigurationError(f"the broker URL says serializer={serializer!r}; use one of {', '.join(SERIALIZERS)}")
    return urlunsplit(parts._replace(query=urlencode(query))), serializer


def ails(error: redis.ResponseError) -> bool:
    """Tell whether an answer is about the server as a whole, and not about one job or its queue."""
    return isinstance(error, _AILING) or _AILING_WORDS.search(str(error)) is not None


def failure(error: BaseException) -> BrokerUnavailable:
    """Return our error for one of `LOST`: refused, where trying again cannot help, else unavailable."""
    if (problem := tls.refusal(error)) is not None:
        return BrokerRefused(f"broker: {problem}")
    return (BrokerRefused if isinstance(error, SAID_NO) else BrokerUnavailable)(describe(error))


def describe(error: BaseException) -> str:
    """Return one line that says what Redis said."""
    return f"broker: {tls.ended(error) or str(error).strip().partition(chr(10))[0] or type(error).__name__}"
