"""Starts a chord through the outbox."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from celery import chord, group
from celery.utils import uuid

if TYPE_CHECKING:
    from collections.abc import Iterable

_STARTER = "celery.chord"
"""A task that every Celery worker has. Celery calls it old; it starts the chord that it is given."""


def launch(canvas: chord, args: Iterable[Any] = (), **options: Any) -> Any:
    """Call one task that starts a chord (`chord(header, body)`, or a group followed by a task) and return the body's result.

    Needed in a unit of work when the result backend counts a chord's members itself, as that of Redis does. `args` go to
    every task of the header, `options` (`queue`, `countdown`, ...) to the task that starts the chord. Results are
    known by the ids that they have here; parent and root of the header's tasks are that task.

    Not guaranteed: that it is started once. A worker that dies half-way through starts it again only with `acks_late`, and
    then under the same task ids, which transactional tasks know for duplicates.
    Raises `TypeError` for what is not a chord, and what a call of a task in a unit of work raises.
    """
    if not isinstance(canvas, chord):
        raise TypeError(f"launch() takes a chord, not {type(canvas).__qualname__!r}; call apply_async() on anything else")
    canvas = canvas.clone()
    app = canvas.app
    header = canvas.tasks if isinstance(canvas.tasks, group) else group(canvas.tasks, app=app)
    body = canvas.body.clone()
    result = body.freeze(canvas.options.get("task_id") or uuid())
    result.parent = header.freeze()
    arguments = {
        **{name: value for name, value in canvas.options.items() if name not in ("task_id", "countdown", "eta")},
        "header": [dict(signature) for signature in header.tasks],
        "body": dict(body),
        "partial_args": list(args),
        "task_id": body.options["task_id"],
    }
    delay = {name: canvas.options[name] for name in ("countdown", "eta") if canvas.options.get(name)}
    app.send_task(_STARTER, kwargs=arguments, **{**delay, **options})
    return result
