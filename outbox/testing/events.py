"""What is in the outbox, as values and as assertions, read from the real table in the test's own transaction."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, overload

import sqlalchemy as sa

from outbox.store import snapshots
from outbox.tables import DEFAULT, Tables
from outbox.testing.reaching import through

if TYPE_CHECKING:
    from collections.abc import Coroutine, Mapping, Sequence
    from datetime import datetime
    from uuid import UUID

    from outbox.testing.reaching import Awaited, Plain


@dataclass(frozen=True, slots=True)
class Enqueued:
    """One event as it is in the outbox. Times are aware, in UTC."""

    message_id: UUID
    topic: str
    key: str | None
    type: str
    content_type: str
    payload: bytes
    headers: Mapping[str, Any] = field(repr=False)
    state: str
    available_at: datetime = field(repr=False)
    created_at: datetime = field(repr=False)

    def json(self) -> Any:
        """Return the payload decoded as JSON. Raises `ValueError` when it is not JSON."""
        return json.loads(self.payload)


_COLUMNS = tuple(Enqueued.__dataclass_fields__)


@overload
def enqueued(target: Plain, *, topic: str | None = ..., tables: Tables = ...) -> list[Enqueued]: ...
@overload
def enqueued(target: Awaited, *, topic: str | None = ..., tables: Tables = ...) -> Coroutine[Any, Any, list[Enqueued]]: ...
def enqueued(target: Any, *, topic: str | None = None, tables: Tables = DEFAULT) -> Any:
    """Return what is in the outbox (of one topic), in the order in which it was enqueued, whatever its state.

    `target` is a session or connection: also what its own transaction has not committed is there, and pending events are
    flushed before. With an engine only what is committed is there. For an async one the result is to be awaited. Not there:
    what a relay, or `drain`, has published, since it deletes those.
    """

    def read(connection: sa.Connection) -> list[Enqueued]:
        rows = snapshots.read(connection, tables.message)
        return [Enqueued(**{name: row[name] for name in _COLUMNS}) for row in rows if topic in (None, row["topic"])]

    return through(target, tables, read)


@overload
def assert_enqueued(
    target: Plain,
    *,
    topic: str,
    key: object = ...,
    payload: object = ...,
    headers: object = ...,
    times: int = ...,
    tables: Tables = ...,
) -> list[Enqueued]: ...
@overload
def assert_enqueued(
    target: Awaited,
    *,
    topic: str,
    key: object = ...,
    payload: object = ...,
    headers: object = ...,
    times: int = ...,
    tables: Tables = ...,
) -> Coroutine[Any, Any, list[Enqueued]]: ...
def assert_enqueued(
    target: Any,
    *,
    topic: str,
    key: object = ...,
    payload: object = ...,
    headers: Mapping[str, Any] | Any = ...,
    times: int = 1,
    tables: Tables = DEFAULT,
) -> Any:
    """Raise `AssertionError` unless exactly `times` events of this kind are in the outbox; return them.

    What is not given may be anything. `key` is compared as text, None means no key. `payload` is compared as JSON after the
    encoding that `enqueue` would apply to it, bytes byte for byte; `unittest.mock.ANY` may stand for parts of it. Of `headers`
    those that are given must be there. `target` as for `enqueued`: to be awaited for an async one.
    """
    from outbox.testing.matching import Wanted

    wanted = Wanted(topic=topic, key=key, payload=payload, headers=headers)

    def check(connection: sa.Connection) -> list[Enqueued]:
        there: Sequence[Enqueued] = enqueued(connection, tables=tables)
        matching = [each for each in there if not wanted.mismatches(each)]
        if len(matching) != times:
            raise AssertionError(wanted.failure(times, len(matching), there))
        return matching

    return through(target, tables, check)


@overload
def refute_enqueued(
    target: Plain, *, topic: str, key: object = ..., payload: object = ..., headers: object = ..., tables: Tables = ...
) -> None: ...
@overload
def refute_enqueued(
    target: Awaited, *, topic: str, key: object = ..., payload: object = ..., headers: object = ..., tables: Tables = ...
) -> Coroutine[Any, Any, None]: ...
def refute_enqueued(target: Any, *, topic: str, **parts: Any) -> Any:
    """Raise `AssertionError` if an event of this kind is in the outbox. Parameters as for `assert_enqueued`."""
    return assert_enqueued(target, topic=topic, **parts, times=0)
