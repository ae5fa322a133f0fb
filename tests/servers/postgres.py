"""PostgreSQL for the tests: `with Postgres() as pg:`, and an empty database for each test."""

import os
import pwd
import secrets
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar, Literal

from sqlalchemy import URL, Connection, NullPool, create_engine, make_url, text
from sqlalchemy.exc import OperationalError

from tests.servers.proc import PrivateServer, find_program, free_port

URL_VARIABLE = "OUTBOX_TEST_POSTGRES_URL"

CONFIGURATION = """
listen_addresses = '127.0.0.1'
port = {port}
unix_socket_directories = '{folder}'
max_connections = 200
"""


class Databases:
    """Makes and drops databases on the server that the URL names; its user may create them."""

    def __init__(self, url: str) -> None:
        self.url = url

    def create_database(self, *, like: str = "template1") -> str:
        """Create a new empty database, or a copy of one that nobody is connected to (its URL or its name), and return its URL."""
        name = f"test_{secrets.token_hex(6)}"
        with self._administrator() as connection:
            connection.execute(text(f"CREATE DATABASE {name} TEMPLATE {_name(like)}"))
        return _text(make_url(self.url).set(database=name))

    def drop_database(self, database: str) -> None:
        """Drop a database, given its URL or its name, with all its connections."""
        with self._administrator() as connection:
            connection.execute(text(f"DROP DATABASE IF EXISTS {_name(database)} WITH (FORCE)"))

    def terminate_backends(self, database: str | None = None) -> int:
        """Cut all client connections, or those to one database (its URL or its name); return how many."""
        statement = text(
            "SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity WHERE backend_type = 'client backend'"
            " AND pid <> pg_backend_pid() AND (CAST(:database AS text) IS NULL OR datname = :database)"
        )
        with self._administrator() as connection:
            return connection.execute(statement, {"database": database and _name(database)}).scalar_one()

    @contextmanager
    def _administrator(self) -> Iterator[Connection]:
        engine = create_engine(self.url, isolation_level="AUTOCOMMIT", poolclass=NullPool)
        with engine.connect() as connection:
            yield connection


class Postgres(PrivateServer, Databases):
    """A private PostgreSQL on 127.0.0.1, with a password, fsync on, and a folder of its own."""

    name: ClassVar[str] = "postgres"
    kill_signal: ClassVar[signal.Signals] = signal.SIGQUIT  # SIGKILL would leave shared memory behind
    _not_ready = (OperationalError,)

    def __init__(self) -> None:
        self._owner = _server_user()
        PrivateServer.__init__(self, owner=self._owner)
        self.port = free_port()
        self._password = secrets.token_hex(8)
        url = URL.create("postgresql+psycopg", "outbox", self._password, "127.0.0.1", self.port, "postgres")
        Databases.__init__(self, _text(url))

    def stop(self, *, mode: Literal["smart", "fast", "immediate"] = "fast") -> None:
        """Stop the server: waiting for clients, cutting them off, or at once (then it recovers as after a crash)."""
        self._end({"smart": signal.SIGTERM, "fast": signal.SIGINT, "immediate": signal.SIGQUIT}[mode])

    def _launch(self) -> subprocess.Popen[bytes]:
        data = self.folder / "data"
        if not data.exists():
            self._initialise()
        return self._spawn([_program("postgres"), "-D", data], env=_environment(), **self._as_owner())

    def _connect(self) -> None:
        with self._administrator():
            pass

    def _initialise(self) -> None:
        data, password = self.folder / "data", self.folder / "password"
        password.write_text(self._password)
        if self._owner:
            os.chown(password, pwd.getpwnam(self._owner).pw_uid, -1)
        subprocess.run(
            [_program("initdb"), "--no-sync", "--locale=C", "--encoding=UTF8", "--username=outbox",
             "--auth=scram-sha-256", f"--pwfile={password}", f"--pgdata={data}"],
            cwd=self.folder, env=_environment(), check=True, capture_output=True, text=True, **self._as_owner(),
        )  # fmt: skip
        with (data / "postgresql.conf").open("a") as configuration:
            configuration.write(CONFIGURATION.format(port=self.port, folder=self.folder))

    def _as_owner(self) -> dict[str, Any]:
        if self._owner is None:
            return {}
        return {"user": self._owner, "group": pwd.getpwnam(self._owner).pw_gid, "extra_groups": []}


@contextmanager
def postgres_server() -> Iterator[Databases]:
    """The server that OUTBOX_TEST_POSTGRES_URL names, else a private one."""
    if url := os.environ.get(URL_VARIABLE):
        yield Databases(url)
    else:
        with Postgres() as private:
            yield private


def _server_user() -> str | None:
    """Who runs the server: PostgreSQL refuses to run as root."""
    if os.geteuid() != 0:
        return None
    return "postgres" if any(user.pw_name == "postgres" for user in pwd.getpwall()) else "nobody"


def _program(name: str) -> Path:
    # Both from one folder: PATH may have links to some programs of one version and not to others.
    return find_program("initdb", "usr/lib/postgresql/*/bin", "usr/pgsql-*/bin").resolve().with_name(name)


def _environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if not name.startswith("PG")}


def _name(database: str) -> str:
    name = make_url(database).database if "://" in database else database
    assert name is not None
    return name


def _text(url: URL) -> str:
    return url.render_as_string(hide_password=False)
