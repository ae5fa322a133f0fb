"""PgBouncer for the tests: a transaction pooler in front of a PostgreSQL."""

import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psycopg
from sqlalchemy import make_url

from tests.servers.postgres import _server_user
from tests.servers.proc import find_program, free_port

_CONFIGURATION = """
[databases]
{name} = host={host} port={port} dbname={name} user={user} password={password}
[pgbouncer]
listen_addr = 127.0.0.1
listen_port = {listen}
auth_type = any
pool_mode = transaction
default_pool_size = 5
ignore_startup_parameters = extra_float_digits
unix_socket_dir =
logfile = {folder}/log
pidfile = {folder}/pid
"""


@contextmanager
def transaction_pooler(url: str) -> Iterator[str]:
    """Run one in front of the database that a URL names; give the URL that leads through it."""
    where, listen = make_url(url), free_port()
    with tempfile.TemporaryDirectory() as folder:
        configuration = Path(folder) / "pgbouncer.ini"
        configuration.write_text(
            _CONFIGURATION.format(
                name=where.database,
                host=where.host,
                port=where.port,
                user=where.username,
                password=where.password,
                listen=listen,
                folder=folder,
            )
        )
        Path(folder).chmod(0o777)
        through = where.set(port=listen).render_as_string(hide_password=False)
        server = subprocess.Popen(
            [find_program("pgbouncer", "usr/sbin"), "-q", configuration], user=_server_user(), stderr=subprocess.DEVNULL
        )
        try:
            _wait_until_ready(through)
            yield through
        finally:
            server.terminate()
            server.wait(10)


def _wait_until_ready(url: str) -> None:
    deadline = time.monotonic() + 20
    while True:
        try:
            psycopg.connect(url.replace("+psycopg", "")).close()
            return
        except psycopg.OperationalError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.05)
