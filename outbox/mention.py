"""How log lines name the message that they are about."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from types import MappingProxyType
from typing import Any, Protocol

# W3C Trace Context: version, trace id, parent id, flags; later versions may add to it.
_TRACEPARENT = re.compile(r"[0-9a-f]{2}-(?!0{32})([0-9a-f]{32})-[0-9a-f]{16}-[0-9a-f]{2}(?:-.*)?")


class Named(Protocol):
    """A message, or an event about one."""

    @property
    def message_id(self) -> object:
        """Its id."""

    @property
    def topic(self) -> str:
        """Its topic."""

    @property
    def headers(self) -> Mapping[str, Any] | None:
        """Its headers, unless they were too large to be read."""


def naming(message: Named) -> dict[str, Any]:
    """Return the `extra` keys that say which message it is: `message_id`, `topic`, and `trace_id` when it carries a trace."""
    named = {"message_id": str(message.message_id), "topic": message.topic}
    trace_id = trace_id_of(message.headers or {})
    return named if trace_id is None else named | {"trace_id": trace_id}


def trace_id_of(headers: Mapping[str, Any]) -> str | None:
    """Return the trace id in the header `traceparent`, if there is a valid one."""
    given = headers.get("traceparent")
    found = _TRACEPARENT.fullmatch(given) if isinstance(given, str) else None
    return None if found is None else found[1]


_current: ContextVar[Mapping[str, Any]] = ContextVar("outbox_mention", default=MappingProxyType({}))


@contextmanager
def mentioned(message: Named) -> Iterator[None]:
    """Let every record that is logged in the block, in this context, also say which message it is about."""
    token = _current.set(naming(message))
    try:
        yield
    finally:
        _current.reset(token)


def current() -> Mapping[str, Any]:
    """Return the keys of the message that is being handled here; none outside of a block."""
    return _current.get()
