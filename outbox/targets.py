"""Tells what an event may be enqueued into: any session or connection of SQLAlchemy.

`sqlalchemy.ext.asyncio` is looked up only where the application has loaded it: it needs greenlet, which may be missing.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, TypeAlias

from sqlalchemy.orm import Session, scoped_session

if TYPE_CHECKING:
    from types import ModuleType

    from sqlalchemy import Connection
    from sqlalchemy.ext.asyncio import AsyncSession, async_scoped_session

    Target: TypeAlias = Session | scoped_session[Any] | AsyncSession | async_scoped_session[Any] | Connection
    """What takes an event at once; an `AsyncConnection` takes one when awaited."""


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


def is_async_connection(target: Any) -> bool:
    """Tell whether `target` is an `AsyncConnection`."""
    asyncio = _asyncio()
    return asyncio is not None and isinstance(target, asyncio.AsyncConnection)


def _asyncio() -> ModuleType | None:
    return sys.modules.get("sqlalchemy.ext.asyncio")
