"""Waits for a wake-up, for the time to pass, or for the stop, whichever comes first; a flood of wake-ups is held off."""

from __future__ import annotations

import selectors
import threading
import time
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Protocol, Self

from outbox.relay.hearing import Datagrams
from outbox.relay.listening import Listening
from outbox.wakeaddress import Postgres, parse
from outbox.waker import Waker

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from outbox.settings import RelaySettings

_FIRST_GAP_S = 0.002
_LONGEST_GAP_S = 0.064
_AGAIN_S = 0.01
_END_S = 1.0


class Source(Protocol):
    """Something that becomes readable when somebody wakes us."""

    def fileno(self) -> int:
        """Return the descriptor to wait on."""

    def clear(self) -> None:
        """Forget all wake-ups so far."""


def gap_s(fruitless: int) -> float:
    """Return how long after a wake-up the next one is heard, when so many in a row brought nothing to publish."""
    return min(_LONGEST_GAP_S, _FIRST_GAP_S * 2.0 ** min(fruitless, 10))


def source_of(settings: RelaySettings) -> Listening | Datagrams | None:
    """Return what a relay is to hear wake-ups from, before it is opened. Raises `ConfigurationError`."""
    if settings.wake is None:
        return None
    address = parse(settings.wake)
    if isinstance(address, Postgres):
        return Listening(settings.wake_database_url or settings.database_url)
    return Datagrams(address)


@contextmanager
def waking(settings: RelaySettings, stop: threading.Event) -> Iterator[WakeUps | None]:
    """Give the wake-ups that a relay is to hear, if any. Raises `ConfigurationError` when it cannot have its address."""
    source = source_of(settings)
    if source is None:
        yield None
        return
    with source, WakeUps(source, stop) as wake_ups:
        yield wake_ups


class WakeUps:
    """Wake-ups from one source, for one thread that waits. A context manager.

    A wake-up that comes while nobody waits is kept for the next `wait`, unless `clear` comes in between. Wake-ups in a row
    are heard at most every few milliseconds, and those that bring nothing ever more seldom, up to 15 a second: so that
    whoever floods the address makes the relay neither busy nor deaf.
    """

    def __init__(self, source: Source, stop: threading.Event, *, seconds: Callable[[], float] = time.monotonic) -> None:
        self._source = source
        self._stop = stop
        self._seconds = seconds
        self._woken_at = float("-inf")
        self._fruitless = 0
        self._look_again = False
        self._exit = ExitStack()
        self._closed = False

    def clear(self) -> None:
        """Forget the wake-ups so far: to be called before looking for what they announce, so that later ones count again."""
        self._source.clear()

    def fruitful(self) -> None:
        """Note that the last wake-up brought something to do."""
        self._fruitless = 0
        self._look_again = False

    def wait(self, timeout_s: float) -> bool:
        """Wait; tell whether to look now, although the time has not passed.

        That is after a wake-up, and once more shortly after one that brought nothing: a producer sends no second datagram
        within a millisecond of the first, whose transaction may have been rolled back to a savepoint.
        """
        again, self._look_again = self._look_again, False
        woken = self._wait(min(timeout_s, _AGAIN_S) if again else timeout_s)
        self._look_again = woken and self._fruitless == 1
        return woken or again

    def _wait(self, timeout_s: float) -> bool:
        until = self._seconds() + timeout_s
        self._hold_off(timeout_s)
        ready = [key.fileobj for key, _ in self._selector.select(max(0.0, until - self._seconds()))]
        if self._source not in ready:
            return False
        self._woken_at = self._seconds()
        self._fruitless += 1
        return True

    def _hold_off(self, timeout_s: float) -> None:
        left_s = self._woken_at + gap_s(self._fruitless) - self._seconds()
        if left_s > 0:
            self._stop.wait(min(left_s, timeout_s))

    def _pass_on_the_stop(self) -> None:
        while not self._stop.wait(_END_S):
            if self._closed:
                return
        self._waker.wake()

    def __enter__(self) -> Self:
        self._selector = self._exit.enter_context(selectors.DefaultSelector())
        self._waker = self._exit.enter_context(Waker())
        self._selector.register(self._source, selectors.EVENT_READ)
        self._selector.register(self._waker, selectors.EVENT_READ)
        # An Event cannot be waited for together with a descriptor.
        threading.Thread(target=self._pass_on_the_stop, name="outbox-stop", daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._closed = True
        self._exit.close()
