"""Writes events into the outbox, within the caller's transaction."""

from __future__ import annotations

from itertools import groupby
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar, overload

import sqlalchemy as sa

from outbox import transactions
from outbox.encoding import JSON
from outbox.events import Event, as_event
from outbox.identity import new_message_id, partition_of
from outbox.sqltypes import later
from outbox.states import State
from outbox.tables import DEFAULT, SCHEMA_VERSION, Tables
from outbox.targets import is_async_connection, session_of
from outbox.tracing.creating import traced
from outbox.waking import enqueued

if TYPE_CHECKING:
    from collections.abc import Coroutine, Iterable
    from uuid import UUID

    from sqlalchemy.ext.asyncio import AsyncConnection
    from sqlalchemy.orm import Session

    from outbox.targets import Target

Values: TypeAlias = dict[str, Any]
R = TypeVar("R")


@overload
def enqueue(target: Target, event: object, *, tables: Tables = ...) -> UUID: ...
@overload
def enqueue(target: AsyncConnection, event: object, *, tables: Tables = ...) -> Coroutine[Any, Any, UUID]: ...
def enqueue(target: Target | AsyncConnection, event: object, *, tables: Tables = DEFAULT) -> UUID | Coroutine[Any, Any, UUID]:
    """Add an event to the caller's transaction, and return its message id.

    `target` is a `Session`, `AsyncSession`, or a scoped one of either: the event is added to the unit of work, without any
    I/O, and is inserted by the next flush. Or it is a `Connection`: one INSERT is executed. With an
    `AsyncConnection` the result is to be awaited. `event` is an `Event` or an instance of a class registered with
    `@outbox.event`. `tables` is what `attach` returned, when the outbox tables are not the default ones.

    Guarantees: nothing is flushed, committed or begun on the database here; the event is published if and only if the
    transaction, and the savepoint it was enqueued in, commits. Does not guarantee: order within a key between transactions
    that change the same aggregate at once, unless each locks its row before the event is inserted (`with_for_update`, or
    `session.flush()` between the change and `enqueue`, because one flush may insert the event first); nor that a
    second event with the same `message_id` is accepted: its INSERT fails.

    Raises `InvalidEvent`, `NoTransaction` (no transaction, or autocommit; with a session at the flush, when
    it could not be known before), and `ConfigurationError` when the session has no bind for the outbox tables.
    """
    message = _message(event)
    if is_async_connection(target):
        return _insert_async(target, [message], tables, message["message_id"])
    _write(target, [message], tables)
    message_id: UUID = message["message_id"]
    return message_id


@overload
def enqueue_many(target: Target, events: Iterable[object], *, tables: Tables = ...) -> list[UUID]: ...
@overload
def enqueue_many(
    target: AsyncConnection, events: Iterable[object], *, tables: Tables = ...
) -> Coroutine[Any, Any, list[UUID]]: ...
def enqueue_many(
    target: Target | AsyncConnection, events: Iterable[object], *, tables: Tables = DEFAULT
) -> list[UUID] | Coroutine[Any, Any, list[UUID]]:
    """Do what `enqueue` does for many events, in their order, and return their message ids.

    None is added when one of them is invalid. A `Connection` executes one INSERT, or several when only some are delayed.
    """
    messages = [_message(event) for event in events]
    ids = [message["message_id"] for message in messages]
    if is_async_connection(target):
        return _insert_async(target, messages, tables, ids)
    _write(target, messages, tables)
    return ids


def _message(value: object) -> Values:
    """Return the columns of one message. What the database fills in is left out; `delay_s` stands for a delay."""
    event = as_event(value)
    message_id = event.message_id or new_message_id()
    message: Values = {
        "message_id": message_id,
        "topic": event.topic,
        "key": event.key,
        "partition": partition_of(event.key),
        "type": event.type or event.topic,
        "content_type": event.content_type or JSON,
        "payload": event.body,
        "headers": _headers(event, message_id),
        "schema_version": SCHEMA_VERSION,
    }
    if event.available_at is not None:
        message |= {"state": State.SCHEDULED.value, "available_at": event.available_at}
    elif event.delay:
        message |= {"state": State.SCHEDULED.value, "delay_s": event.delay.total_seconds()}
    return message


def _headers(event: Event, message_id: UUID | str) -> dict[str, Any]:
    delivery = event.delivery
    if delivery is not None and "traceparent" in delivery.headers:  # another library's instrumentation was here first
        return {**(event.headers or {}), **delivery.as_header()}
    headers: dict[str, Any] = traced(event.headers or {}, topic=event.topic, message_id=message_id)
    return headers if delivery is None else headers | delivery.as_header()


def _write(target: Any, messages: list[Values], tables: Tables) -> None:
    if isinstance(target, sa.Connection):
        _insert(target, messages, tables)
    else:
        _add(session_of(target), messages, tables)


def _add(session: Session, messages: list[Values], tables: Tables) -> None:
    transactions.require_session(session, tables.row)
    session.add_all([tables.row(**_row_values(message)) for message in messages])


def _row_values(message: Values) -> Values:
    if "delay_s" not in message:
        return message
    due = later(sa.literal(message["delay_s"], sa.Float()))
    return {name: value for name, value in message.items() if name != "delay_s"} | {"available_at": due}


def _insert(connection: sa.Connection, messages: list[Values], tables: Tables) -> None:
    transactions.require_connection(connection)
    # Inline: a single row would else bring back the id that the database gave it, and to read that is a right of its own.
    plain = sa.insert(tables.message).inline()
    delayed = plain.values(available_at=later(sa.bindparam("delay_s", type_=sa.Float())))
    for columns, run in groupby(messages, key=lambda message: message.keys()):
        connection.execute(delayed if "delay_s" in columns else plain, list(run))
    if messages:
        enqueued(connection)


async def _insert_async(target: Any, messages: list[Values], tables: Tables, result: R) -> R:
    await target.run_sync(_insert, messages, tables)
    return result
