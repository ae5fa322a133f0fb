"""Turns what Celery would have published into an event with a delivery of its own."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from outbox.checks import SHORT_TEXT_BYTES
from outbox.delivery import DELAY_BITS, Delivery
from outbox.events import Event

if TYPE_CHECKING:
    from outbox.celery.recording import Recorded

TOPICS = "celery.#"
"""Selects all messages of Celery: for the relay's policies, pauses and dead letters. Routes have no say in them."""

_TOPIC_LENGTH = 255
_NOT_IN_A_WORD = re.compile(r"[^A-Za-z0-9_-]")
_DELAYED_EXCHANGE = re.compile(r"(?:.+_)?celery_delayed_\d+")
_DELAYED_KEY = re.compile(rf"((?:[01]\.){{{DELAY_BITS}}})(.*)", re.DOTALL)


def topic_of(task: str) -> str:
    """Return the topic of a task: `celery.` and its name, with `_` for what a topic may not contain."""
    words = [_NOT_IN_A_WORD.sub("_", word) or "_" for word in task.split(".")]
    return ".".join(("celery", *words))[:_TOPIC_LENGTH].rstrip(".")


def event_of(task: str, recorded: Recorded, *, key: str | None) -> Event:
    """Return the event for a recorded publish. Raises `InvalidEvent` for one that the outbox cannot hold."""
    properties = dict(recorded.properties)
    expiration = properties.pop("expiration", None)  # kombu's: milliseconds, as text
    routing_key, delay_s = _without_delay(recorded)
    return Event(
        topic=topic_of(task),
        type=task if task.isprintable() and len(task.encode()) <= SHORT_TEXT_BYTES else None,
        payload=recorded.body,
        content_type=recorded.content_type,
        key=key,
        delivery=Delivery(
            exchange=recorded.exchange,
            routing_key=routing_key,
            headers=recorded.headers,
            properties=properties,
            expires_in_s=None if expiration is None else int(expiration) / 1000,
            delay_s=delay_s,
            queues=recorded.queues,
        ),
    )


def _without_delay(recorded: Recorded) -> tuple[str, int | None]:
    """Return the routing key, and the delay in seconds that kombu's native delayed delivery has written before it."""
    found = _DELAYED_KEY.fullmatch(recorded.routing_key) if _DELAYED_EXCHANGE.fullmatch(recorded.exchange) else None
    return (recorded.routing_key, None) if found is None else (found[2], int(found[1].replace(".", ""), 2))
