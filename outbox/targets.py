"""Tells what an event may be enqueued into: any session or connection of SQLAlchemy.

`sqlalchemy.ext.asyncio` is looked up only where the application has loaded it: it needs greenlet, which may be missing.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, TypeAlias

from sqlalchemy import Engine
from sqlalchemy.exc import UnboundExecutionError
from sqlalchemy.orm import Session, scoped_session

from outbox.errors import ConfigurationError

if TYPE_CHECKING:
    from types import ModuleType

    from sqlalchemy import Connection
    from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession, async_scoped_session, async_sessionmaker
    from sqlalchemy.orm import sessionmaker

    from outbox.tables import Tables

    Target: TypeAlias = Session | scoped_session[Any] | AsyncSession | async_scoped_session[Any] | Connection
    """What takes an event at once; an `AsyncConnection` takes one when awaited."""
    Source: TypeAlias = (
        Engine | AsyncEngine | sessionmaker[Any] | async_sessionmaker[Any] | scoped_session[Any] | async_scoped_session[Any]
    )
    """What the connections or sessions that events are enqueued into come from."""


def session_of(target: Any) -> Session:
    """Return the plain session behind a session of any kind. Raises `TypeError` for anything else."""
    asyncio = _asyncio()
    scoped = isinstance(target, scoped_session) or (asyncio is not None and isinstance(target, asyncio.async_scoped_session))
    session = target() if scoped else target
    session = getattr(session, "sync_session", session)
    if not isinstance(session, Session):
        raise TypeError(
            f"cannot enqueue into {type(target).__qualname__!r}; "
            "pass the Session or Connection whose transaction the event is to be part of"
        )
    return session


def bind_of(source: Any, tables: Tables) -> Engine:
    """Return the engine behind an engine of any kind, or behind the sessions that a factory makes.

    Raises `ConfigurationError` when those sessions have no engine for the outbox tables yet, `TypeError` for anything else.
    """
    engine = getattr(source, "sync_engine", source)
    if isinstance(engine, Engine):
        return engine
    if not callable(source) or isinstance(source, type):
        raise TypeError(f"expected an engine or a factory of sessions, not {type(source).__qualname__!r}")
    factory = getattr(source, "session_factory", source)  # a scoped one would keep the session that it makes
    try:
        return session_of(factory()).get_bind(mapper=tables.row).engine
    except UnboundExecutionError as error:
        raise ConfigurationError("the sessions have no engine for the outbox tables yet; give the engine itself") from error


def is_async_connection(target: Any) -> bool:
    """Tell whether `target` is an `AsyncConnection`."""
    asyncio = _asyncio()
    return asyncio is not None and isinstance(target, asyncio.AsyncConnection)


def _asyncio() -> ModuleType | None:
    return sys.modules.get("sqlalchemy.ext.asyncio")
