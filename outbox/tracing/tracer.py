"""The tracer of an application that has set OpenTelemetry up, and what becomes of its errors."""

from __future__ import annotations

import logging
import sys
from typing import TYPE_CHECKING, Any

from outbox.tracing import names
from outbox.wire import TRACE_HEADERS

if TYPE_CHECKING:
    from collections.abc import Mapping
    from types import TracebackType

log = logging.getLogger("outbox.tracing")

_told: set[str] = set()
_found: tuple[Any, Any] | None = None


class Harmless:
    """A context manager that logs, once for each thing that is being done, what is raised inside, and raises it no further."""

    def __init__(self, doing: str) -> None:
        self._doing = doing

    def __enter__(self) -> None:
        pass

    def __exit__(self, _kind: type[BaseException] | None, error: BaseException | None, _traceback: TracebackType | None) -> bool:
        if not isinstance(error, Exception):
            return False
        if self._doing not in _told:
            _told.add(self._doing)
            log.warning("tracing failed; said once", extra={"doing": self._doing, "error": repr(error)}, exc_info=error)
        return True


def api() -> Any | None:
    """Return OpenTelemetry's module `trace`, if somebody has loaded it."""
    return sys.modules.get("opentelemetry.trace")


def tracer() -> Any | None:
    """Return our tracer, or None where spans would be for nothing: no provider is set up, or instrumentation is suppressed."""
    trace = api()
    if trace is None:
        return None
    with Harmless("looking for a tracer"):
        provider = trace.get_tracer_provider()
        if isinstance(provider, trace.ProxyTracerProvider | trace.NoOpTracerProvider) or _suppressed():
            return None
        return _tracer_of(provider)
    return None


def remote(trace: Any, headers: Mapping[str, Any]) -> Any | None:
    """Return the span context that a message's headers carry, or None when there is none that is valid."""
    if not isinstance(headers.get("traceparent"), str | bytes):
        return None
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    context = TraceContextTextMapPropagator().extract(carrier(headers), context=_empty())
    found = trace.get_current_span(context).get_span_context()
    return found if found.is_valid else None


def carrier(headers: Mapping[str, Any]) -> dict[str, str]:
    """Return what a message's headers carry of its trace, as texts."""
    return {name: text(headers[name]) for name in TRACE_HEADERS if isinstance(headers.get(name), str | bytes)}


def text(value: str | bytes) -> str:
    """Return a header's value as text."""
    return value.decode("latin-1") if isinstance(value, bytes) else value


def _tracer_of(provider: Any) -> Any:
    global _found  # noqa: PLW0603 - an SDK makes a new tracer at every call
    if _found is None or _found[0] is not provider:
        version = getattr(sys.modules.get("outbox"), "__version__", None)  # the package itself is not for those below to import
        _found = (provider, provider.get_tracer(names.SCOPE, version, schema_url=names.SCHEMA_URL))
    return _found[1]


def _suppressed() -> bool:
    from opentelemetry import context

    return bool(context.get_value("suppress_instrumentation"))


def _empty() -> Any:
    from opentelemetry.context import Context

    return Context()
