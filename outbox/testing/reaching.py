"""Reaches the outbox through whatever a test has in hand: an engine, a connection or a session, plain or async."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

import sqlalchemy as sa

from outbox.inbox.transaction import connection_of
from outbox.targets import session_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine, AsyncSession, async_scoped_session
    from sqlalchemy.orm import Session, scoped_session

    from outbox.tables import Tables

    Plain: TypeAlias = sa.Engine | sa.Connection | Session | scoped_session[Any]
    """An engine sees what is committed; a connection or session also what its own transaction has done."""
    Awaited: TypeAlias = AsyncEngine | AsyncConnection | AsyncSession | async_scoped_session[Any]
    """The same for asyncio: the result is to be awaited."""

R = TypeVar("R")


def through(target: Any, tables: Tables, work: Callable[[sa.Connection], R]) -> Any:
    """Do some work on a connection of the target; return its result, or for an async target what is to be awaited.

    What is pending in a session is flushed before.
    """
    if hasattr(target, "registry"):  # a scoped session stands for the session of this thread or task
        target = target()
    if hasattr(target, "run_sync"):
        return target.run_sync(lambda plain: work(connection(plain, tables)))
    if hasattr(target, "sync_engine"):
        return _on_engine(target, work)
    if isinstance(target, sa.Engine):
        with target.begin() as begun:
            return work(begun)
    return work(connection(target, tables))


async def _on_engine(engine: AsyncEngine, work: Callable[[sa.Connection], R]) -> R:
    async with engine.begin() as begun:
        return await begun.run_sync(work)


def connection(target: Any, tables: Tables) -> sa.Connection:
    """Return the connection of a session, after a flush, or the connection that was given."""
    if isinstance(target, sa.Connection):
        return target
    session = session_of(target)
    session.flush()
    return connection_of(session, tables)
