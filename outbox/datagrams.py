"""Sends wake-ups as datagrams: at no cost to speak of, and without ever delaying or failing whoever has committed."""

from __future__ import annotations

import socket
from contextlib import suppress
from time import monotonic

from outbox.wakeaddress import Udp, Unix

EVERY_S = 0.001
_WAKE = b"wake"  # what is in it says nothing: a relay only notes that something came


class Sender:
    """Sends to one address. Thread safe.

    It makes a socket for each datagram and keeps none, which costs 7 us (m): so it may be used on both sides of a fork, also
    in a process that closes all descriptors there, where one that was kept could be another's by now. Never connected: a
    relay that was restarted is reached at once, and what became of one datagram does not cost the next.
    """

    def __init__(self, address: Udp | Unix) -> None:
        self._where: tuple[object, ...] | str
        self._family, self._where = address.resolve() if isinstance(address, Udp) else (socket.AF_UNIX, address.path)
        self._sent_at = 0.0

    def wake(self) -> None:
        """Send one datagram, unless one went out less than a millisecond ago. Raises nothing, and does not wait."""
        now = monotonic()
        if now - self._sent_at < EVERY_S:
            return
        self._sent_at = now
        # Nobody there, no room, no descriptor left: the relay's own poll will find what was committed.
        with suppress(OSError), socket.socket(self._family, socket.SOCK_DGRAM) as sender:
            sender.setblocking(False)
            sender.sendto(_WAKE, self._where)
