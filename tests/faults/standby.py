"""A second PostgreSQL that has everything which the first one has said is committed, and can take its place."""

import subprocess

import sqlalchemy as sa

from tests.servers.postgres import Postgres, _environment, _program, _text


class Standby(Postgres):
    """A hot standby of a running server. From its start on, the server answers a COMMIT when both have it."""

    def __init__(self, primary: Postgres) -> None:
        super().__init__()
        self._primary = primary
        self.url = _text(sa.make_url(primary.url).set(port=self.port))

    def start(self) -> None:
        """Copy the primary, follow it, and have it wait for us with every COMMIT."""
        super().start()
        with self._primary._administrator() as connection:
            connection.execute(sa.text("ALTER SYSTEM SET synchronous_commit = 'remote_apply'"))
            connection.execute(sa.text("ALTER SYSTEM SET synchronous_standby_names = '*'"))
            connection.execute(sa.text("SELECT pg_reload_conf()"))

    def promote(self) -> None:
        """Become the primary, and return when writes are taken."""
        with self._administrator() as connection:
            assert connection.execute(sa.text("SELECT pg_promote()")).scalar_one()

    def either(self, database_url: str) -> str:
        """Return the URL that leads to whichever of the two takes writes."""
        where = sa.make_url(database_url)
        hosts = tuple(f"127.0.0.1:{server.port}" for server in (self._primary, self))
        query = {"host": hosts, "target_session_attrs": "read-write"}
        return _text(sa.URL.create(where.drivername, where.username, where.password, database=where.database, query=query))

    def _initialise(self) -> None:
        data = self.folder / "data"
        primary = sa.make_url(self._primary.url)
        source = f"host={primary.host} port={primary.port} user={primary.username} password={primary.password}"
        subprocess.run(
            [_program("pg_basebackup"), "--write-recovery-conf", "--checkpoint=fast", f"--dbname={source}", f"--pgdata={data}"],
            cwd=self.folder, env=_environment(), check=True, capture_output=True, text=True, **self._as_owner(),
        )  # fmt: skip
        with (data / "postgresql.conf").open("a") as configuration:
            configuration.write(f"port = {self.port}\nunix_socket_directories = '{self.folder}'\n")
