"""Keeps the result backend off the network while tasks are called in a unit of work."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from celery.backends.base import Backend

from outbox.celery.errors import NotThroughOutbox
from outbox.celery.work import UnitOfWork, current

if TYPE_CHECKING:
    from collections.abc import Callable

_CHORD = (
    "a chord begins by writing its size into the result backend, which no transaction could take back; "
    "start it with outbox.celery.launch(chord), which enqueues one task that starts it"
)


def quiet(backend: Any) -> Any:
    """Return the backend, changed so that within a unit of work it does nothing that contacts its server.

    Waiting for results begins with `get()`, as it does for a task that another process has called.
    """
    if getattr(backend, "outbox_is_quiet", False):
        return backend
    backend.outbox_is_quiet = True
    backend.on_task_call = _outside(backend.on_task_call, lambda *_, **__: None)
    if hasattr(backend, "add_pending_result"):
        backend.add_pending_result = _outside(backend.add_pending_result, lambda result, *_, **__: result)
        backend.iter_native = _listening(backend, backend.iter_native)
    for name in ("apply_chord", "set_chord_size"):
        # The base class does without the server: it calls a task that waits for the chord's members.
        if getattr(type(backend), name) is not getattr(Backend, name):
            setattr(backend, name, _outside(getattr(backend, name), _refuse_chord))
    return backend


def _outside(usual: Callable[..., Any], inside: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        return (inside if isinstance(current(), UnitOfWork) else usual)(*args, **kwargs)

    return call


def _listening(backend: Any, usual: Callable[..., Any]) -> Callable[..., Any]:
    """Let a group's results be listened for when they are asked for: otherwise that begins when the group is called."""

    def iter_native(result: Any, *args: Any, **kwargs: Any) -> Any:
        for member in result.results:
            if hasattr(member, "_cache"):  # not a group within the group
                backend.add_pending_result(member, weak=True)
        return usual(result, *args, **kwargs)

    return iter_native


def _refuse_chord(*_: Any, **__: Any) -> None:
    raise NotThroughOutbox(_CHORD)
