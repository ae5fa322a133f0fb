"""Where a relay hears wake-ups: the addresses that producers and relays are given, as text and as values."""

from __future__ import annotations

import re
import socket
from dataclasses import dataclass
from typing import TypeAlias

from outbox.errors import ConfigurationError

CHANNEL = "outbox_wake"
"""The channel of NOTIFY: one for each database, since a wake-up that was meant for another outbox does no harm."""

_UDP = re.compile(r"udp://(?:\[(?P<v6>[0-9A-Fa-f:.]+)\]|(?P<host>[^\s:/\[\]]+)):(?P<port>[0-9]{1,5})")
_LONGEST_PATH = 107  # bytes; the kernel's own limit
_EXPECTED = "write udp://127.0.0.1:7411, unix:///run/outbox/relay.sock, or postgres"


@dataclass(frozen=True, slots=True)
class Udp:
    """A port, on loopback as a rule: `host` may be a name or an address."""

    host: str
    port: int

    def resolve(self) -> tuple[socket.AddressFamily, tuple[object, ...]]:
        """Look the host up; return its family and the address for a socket. Raises `ConfigurationError`."""
        try:
            family, _, _, _, where = socket.getaddrinfo(self.host, self.port, type=socket.SOCK_DGRAM)[0]
        except OSError as error:
            raise ConfigurationError(f"wake: the host of {self} cannot be found: {error.strerror}") from error
        return family, where

    def __str__(self) -> str:
        return f"udp://[{self.host}]:{self.port}" if ":" in self.host else f"udp://{self.host}:{self.port}"


@dataclass(frozen=True, slots=True)
class Unix:
    """A socket in the file system, by its absolute path."""

    path: str

    def __str__(self) -> str:
        return f"unix://{self.path}"


@dataclass(frozen=True, slots=True)
class Postgres:
    """The database itself, by LISTEN and NOTIFY."""

    def __str__(self) -> str:
        return "postgres"


WakeAddress: TypeAlias = Udp | Unix | Postgres


def parse(text: str) -> WakeAddress:
    """Return the address that a text means. Raises `ConfigurationError`. Looks nothing up."""
    if text == "postgres":
        return Postgres()
    udp = _UDP.fullmatch(text)
    if udp is not None and 0 < int(udp["port"]) <= 65_535:
        return Udp(udp["v6"] or udp["host"], int(udp["port"]))
    path = text.removeprefix("unix://")
    if path != text and path.startswith("/") and not path.endswith("/") and "\0" not in path:
        if len(path.encode()) > _LONGEST_PATH:
            raise ConfigurationError(
                f"wake: the path of {text!r} is longer than the {_LONGEST_PATH} bytes that a socket may have"
            )
        return Unix(path)
    raise ConfigurationError(f"wake: {text!r} is no address; {_EXPECTED}")
