"""Reads what a broker has sent in one go.

py-amqp reads each frame in three calls of the system, and sets the socket's timeout before and after; what was read in advance
it takes from its own buffer, where it keeps the rest after a timeout.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import amqp

_AT_ONCE = 16 * 1024
_SIZE = struct.Struct(">3xI")
_AROUND = 8  # kind, channel and size before a frame's content, and its end


def handle(connection: amqp.Connection, *, timeout_s: float) -> None:
    """Wait for the broker to say something, and handle every frame that is complete. Raises `TimeoutError`, and what py-amqp raises."""
    transport = connection.transport
    with transport.having_timeout(timeout_s):
        read = transport.sock.recv(_AT_ONCE)
    if not read:
        raise ConnectionResetError("the broker has closed the connection")
    transport._read_buffer += read  # noqa: SLF001 - see above
    while _holds_a_frame(transport):
        connection.blocking_read()


def _holds_a_frame(transport: Any) -> bool:
    read = transport._read_buffer  # noqa: SLF001 - see above
    return len(read) >= _AROUND and len(read) >= _AROUND + _SIZE.unpack_from(read)[0]
