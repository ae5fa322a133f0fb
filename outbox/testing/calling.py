"""Calls synchronous code of ours where its database driver can run: directly, or in an event loop for an async one."""

from __future__ import annotations

import asyncio
import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from sqlalchemy.util import greenlet_spawn

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

R = TypeVar("R")


class CallIn(Protocol):
    """Calls a function with arguments and returns what it returns; may be used by several threads at once."""

    def __call__(self, function: Callable[..., R], /, *args: Any) -> R:
        """Call it."""


@contextmanager
def calling(*, is_async: bool) -> Iterator[CallIn]:
    """Give what calls functions that use a database: one event loop for all of them when its driver is async."""
    if not is_async:
        yield lambda function, /, *args: function(*args)
        return
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, name="outbox-testing", daemon=True)
    thread.start()
    try:
        yield lambda function, /, *args: asyncio.run_coroutine_threadsafe(_spawned(function, args), loop).result()
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


async def _spawned(function: Callable[..., R], args: tuple[Any, ...]) -> R:
    return await greenlet_spawn(function, *args)
