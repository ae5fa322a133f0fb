"""Redis for the tests: `with Redis() as redis:`, and an empty database for each test."""

import itertools
import os
import secrets
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from typing import ClassVar
from urllib.parse import urlsplit, urlunsplit

import redis

from tests.servers.proc import PrivateServer, find_program, free_port

URL_VARIABLE = "OUTBOX_TEST_REDIS_URL"

# Every write is on disk before its reply, so that a test may kill the server and expect what was acknowledged.
CONFIGURATION = """
bind 127.0.0.1
port {port}
requirepass {password}
dir {folder}
databases 10000
appendonly yes
appendfsync always
save ""
"""


class Keyspaces:
    """Gives out empty databases of the server that the URL names; of a given server the one database that it names."""

    def __init__(self, url: str, *, one_only: bool) -> None:
        self.url = url
        self._one_only = one_only
        self._numbers = itertools.count(1)

    def create_keyspace(self) -> str:
        """Return the URL of an empty database."""
        url = self.url if self._one_only else urlunsplit(urlsplit(self.url)._replace(path=f"/{next(self._numbers)}"))
        self.drop_keyspace(url)
        return url

    def drop_keyspace(self, url: str) -> None:
        """Empty the database of a URL."""
        with redis.Redis.from_url(url) as client:
            client.flushdb()


class Redis(PrivateServer, Keyspaces):
    """A private Redis on 127.0.0.1, with a password, an append-only file and a folder of its own."""

    name: ClassVar[str] = "redis"
    kill_signal: ClassVar[signal.Signals] = signal.SIGKILL
    _not_ready = (redis.ConnectionError, redis.TimeoutError)

    def __init__(self) -> None:
        PrivateServer.__init__(self)
        self.port = free_port()
        password = secrets.token_hex(8)
        Keyspaces.__init__(self, f"redis://:{password}@127.0.0.1:{self.port}/0", one_only=False)
        configuration = CONFIGURATION.format(port=self.port, password=password, folder=self.folder)
        (self.folder / "redis.conf").write_text(configuration)

    def stop(self) -> None:
        """Stop the server in good order."""
        self._end(signal.SIGTERM)

    def _launch(self) -> subprocess.Popen[bytes]:
        return self._spawn([find_program("redis-server"), self.folder / "redis.conf"], env=os.environ)

    def _connect(self) -> None:
        with redis.Redis.from_url(self.url, socket_connect_timeout=5) as client:
            client.ping()


@contextmanager
def redis_server() -> Iterator[Keyspaces]:
    """The server that OUTBOX_TEST_REDIS_URL names, whose database is emptied for each test, else a private one."""
    if url := os.environ.get(URL_VARIABLE):
        yield Keyspaces(url, one_only=True)
    else:
        with Redis() as private:
            yield private
