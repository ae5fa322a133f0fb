"""The heartbeat of a lease: renews it beside the handler, in a thread, or in a task of the event loop."""

from __future__ import annotations

import asyncio
import logging
import threading
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

from sqlalchemy.util import await_only, greenlet_spawn

from outbox.observe.logs import Allowance

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from contextlib import AbstractContextManager

log = logging.getLogger("outbox.inbox")

_SOONER = 4  # after a failure, so that several tries fit into what is left of the lease
_WIND_UP_S = 5.0
_SPEAK_EVERY_S = 30.0


def beating(
    renew: Callable[[], bool], *, every_s: float, is_async: bool, extra: Mapping[str, Any]
) -> AbstractContextManager[None]:
    """Call `renew` every so many seconds during the block, until it returns False.

    An exception is logged, and it is tried again after a quarter of the time: a database that is away for a moment is no
    dead worker; `extra` goes into that record. With `is_async` the block, and each call, runs in a greenlet of the running event loop.
    """
    beat = Beat(renew, every_s=every_s, extra=extra)
    return _in_a_task(beat) if is_async else _in_a_thread(beat)


class Beat:
    """One call of `renew` after the other, and how long to wait between them."""

    def __init__(self, renew: Callable[[], bool], *, every_s: float, extra: Mapping[str, Any]) -> None:
        self._renew = renew
        self._extra = extra
        self._allowance = Allowance(most=1, within_s=_SPEAK_EVERY_S)  # many handlers may run while a database is away
        self.every_s = every_s

    def __call__(self) -> float | None:
        """Renew; return how many seconds to wait before the next time, or None when there is no next time."""
        try:
            return self.every_s if self._renew() else None
        except Exception as error:  # noqa: BLE001 - whatever it was, the lease itself tells how long there is to try
            if self._allowance.take() is not None:
                said = f"{type(error).__name__}: {error}".partition("\n")[0]
                log.warning("lease not renewed, trying again", extra={**self._extra, "error": said})
            return self.every_s / _SOONER


@contextmanager
def _in_a_thread(beat: Beat) -> Iterator[None]:
    stop = threading.Event()

    def run() -> None:
        pause_s: float | None = beat.every_s
        while pause_s is not None and not stop.wait(pause_s):
            pause_s = beat()

    thread = threading.Thread(target=run, name="outbox-lease", daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join(_WIND_UP_S)  # not for ever: it may hang in the network, and what it renews then is fenced


@contextmanager
def _in_a_task(beat: Beat) -> Iterator[None]:
    stop = asyncio.Event()

    async def run() -> None:
        pause_s: float | None = beat.every_s
        while pause_s is not None and not await _set_within(stop, pause_s):
            pause_s = await greenlet_spawn(beat)

    task = asyncio.get_running_loop().create_task(run(), name="outbox-lease")
    try:
        yield
    finally:
        stop.set()
        await_only(_ended(task))


async def _set_within(stop: asyncio.Event, seconds: float) -> bool:
    with suppress(TimeoutError):
        return await asyncio.wait_for(stop.wait(), seconds)
    return False


async def _ended(task: asyncio.Task[None]) -> None:
    _, running = await asyncio.wait({task}, timeout=_WIND_UP_S)
    if running:
        task.cancel()
        await asyncio.wait({task})
