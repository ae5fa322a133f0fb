"""The folder of a demo: what lies where."""

from __future__ import annotations

import json
import os
import shutil
import sqlite3
import tempfile
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from outbox.errors import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

QUEUE = "shipping"
BATCH_SIZE = 100
# The shortest lease that a relay takes: for so long nobody touches what a killed relay had in hand.
_LEASE, _CONFIRM_TIMEOUT = "5500ms", "500ms"
_MEMORY = "/dev/shm"  # noqa: S108 - only a folder of our own in it is used


@dataclass(frozen=True, slots=True)
class Folder:
    """The shop's database, the broker's, the relay's configuration, and what the processes say."""

    path: Path
    is_temporary: bool = False

    @property
    def shop(self) -> Path:
        """The shop's database: its own tables, the outbox and the inbox."""
        return self.path / "shop.db"

    @property
    def broker(self) -> Path:
        """The database that kombu uses as a broker."""
        return self.path / "broker.db"

    @property
    def relay_config(self) -> Path:
        """The relay's configuration."""
        return self.path / "relay.toml"

    @property
    def shop_url(self) -> str:
        """The URL of the shop's database."""
        return f"sqlite:///{self.shop}"

    @property
    def broker_url(self) -> str:
        """The URL of the broker; SQLite waits up to 30 s for a lock."""
        return f"sqla+sqlite:///{self.broker}?timeout=30"

    def log(self, name: str) -> Path:
        """Where a process writes its log."""
        return self.path / f"{name}.log"

    def create(self) -> None:
        """Make the folder, an empty broker, and the relay's configuration.

        Raises `ConfigurationError` if a demo is in it already, or if the folder cannot be made.
        """
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigurationError(f"{self.path}: {error.strerror}") from error
        if self.shop.exists() or self.broker.exists():
            raise ConfigurationError(f"{self.path} has a demo in it already; name another folder, or remove this one")
        connection = sqlite3.connect(self.broker)
        connection.execute("PRAGMA journal_mode = WAL")  # stays with the file; readers and the writer do not wait for each other
        connection.close()
        self.relay_config.write_text(self._config(), encoding="utf-8")

    def _config(self) -> str:
        settings = {
            "database_url": self.shop_url,
            "broker_url": self.broker_url,
            "lease": _LEASE,
            "confirm_timeout": _CONFIRM_TIMEOUT,
            "poll_interval": "100ms",
            "batch_size": BATCH_SIZE,
        }
        route = {"topics": "#", "queues": [QUEUE]}
        return f"{_toml(settings)}\n[[routes]]\n{_toml(route)}"


def _toml(table: Mapping[str, object]) -> str:
    # JSON's strings, numbers and lists are TOML's too.
    return "".join(f"{name} = {json.dumps(value, ensure_ascii=False)}\n" for name, value in table.items())


@contextmanager
def temporary(*, orders: int) -> Iterator[Folder]:
    """Yield a folder that is removed at the end; in memory if there is room for so many orders."""
    with tempfile.TemporaryDirectory(prefix="outbox-demo-", dir=_memory(orders), ignore_cleanup_errors=True) as name:
        yield Folder(Path(name), is_temporary=True)


def _memory(orders: int) -> str | None:
    # kombu commits each message, twice, and so waits for the disk: on a slow one that is most of the time.
    needed = 32 * 2**20 + orders * 8 * 2**10
    with suppress(OSError):
        if os.access(_MEMORY, os.W_OK) and shutil.disk_usage(_MEMORY).free >= needed:
            return _MEMORY
    return None
