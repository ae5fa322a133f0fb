"""Lets threads work with an inbox, also one whose handlers are `async def`: those run in one event loop."""

from __future__ import annotations

import asyncio
import threading
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from sqlalchemy.util import greenlet_spawn

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from outbox.inbox.inbox import Inbox

R = TypeVar("R")

_WIND_UP_S = 5


class Run(Protocol):
    """Calls a function of an inbox."""

    def __call__(self, function: Callable[..., R], *args: Any) -> R:
        """Call it, and return what it returns."""


@contextmanager
def processing(inbox: Inbox) -> Iterator[Run]:
    """Give a way to call functions that work with an inbox, from any thread.

    For an inbox of `async def` handlers they run in one event loop, each in a greenlet, in which SQLAlchemy's synchronous
    code can wait for asynchronous drivers. At the end handlers that still run there are cancelled, and so roll back.
    """
    if not inbox.is_async:
        yield lambda function, *args: function(*args)
        return
    with _loop_in_a_thread() as loop:

        def run(function: Callable[..., R], *args: Any) -> R:
            return asyncio.run_coroutine_threadsafe(greenlet_spawn(function, *args), loop).result()

        try:
            yield run
        finally:
            with suppress(TimeoutError):  # a handler that blocks the loop
                asyncio.run_coroutine_threadsafe(_wind_up(inbox), loop).result(_WIND_UP_S)


@contextmanager
def _loop_in_a_thread() -> Iterator[asyncio.AbstractEventLoop]:
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, name="outbox-consume-loop", daemon=True)
    thread.start()
    try:
        yield loop
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join(_WIND_UP_S)
        if not thread.is_alive():
            loop.close()


async def _wind_up(inbox: Inbox) -> None:
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)
    await inbox.dispose()
