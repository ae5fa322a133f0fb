"""Lets worker threads call an inbox, also one whose handlers are `async def`: those run in one event loop."""

from __future__ import annotations

import asyncio
import threading
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from outbox.inbox.inbox import Inbox, Result
    from outbox.inbox.message import Message

_WIND_UP_S = 5


@contextmanager
def processing(inbox: Inbox) -> Iterator[Callable[[Message], Result]]:
    """Give a function that handles one message and returns its result, to be called from any thread.

    At the end, `async def` handlers that still run are cancelled, and so roll back.
    """
    if not inbox.is_async:
        yield inbox.process
        return
    with _loop_in_a_thread() as loop:
        yield lambda message: asyncio.run_coroutine_threadsafe(inbox.process_async(message), loop).result()
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
