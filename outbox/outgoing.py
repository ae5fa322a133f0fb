"""A claimed message on its way to the broker."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from outbox.delivery import delivery_of

if TYPE_CHECKING:
    from collections.abc import Mapping
    from datetime import datetime
    from uuid import UUID

    from outbox.delivery import Delivery


MOST_HEADERS_BYTES = 128 * 1024
"""The most that the headers of a row may take as JSON: more fits into no frame of RabbitMQ. What `enqueue` takes is
less, however a database stores it."""


class Outgoing(NamedTuple):
    """One unsent row, as read under a lease; a tuple, because many are made for each that is looked at closely.

    `created_at` is in whatever time zone the session had. `age_s` is how long ago it was enqueued, in seconds, by the database's
    clock when it was read. `held_id` is the lowest id among the rows of its key that hold back later ones, if there is any. `headers` is `None` when they
    take more than `MOST_HEADERS_BYTES`, which nobody can send: they are not even read.
    """

    id: int
    message_id: UUID
    topic: str
    key: str | None
    partition: int
    type: str
    content_type: str
    payload: bytes
    headers: Mapping[str, Any] | None
    created_at: datetime
    age_s: float
    attempts: int
    held_id: int | None

    @property
    def delivery(self) -> Delivery | None:
        """Where it goes by itself, if its topic's route has no say. Raises `TypeError` for what this version cannot read."""
        return delivery_of(self.headers) if self.headers else None

    @property
    def must_wait(self) -> bool:
        """An earlier message of this key is backing off, dead or blocked."""
        return self.held_id is not None and self.held_id < self.id

    @property
    def holds_others(self) -> bool:
        """Later messages of this key are blocked behind this one."""
        return self.held_id is not None and self.held_id > self.id
