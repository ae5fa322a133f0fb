"""Servers that are spoken to through TLS, with a certificate for `localhost` that a given authority has signed."""

from urllib.parse import urlsplit, urlunsplit

from sqlalchemy import make_url

from tests.servers.certificates import Authority
from tests.servers.postgres import Postgres
from tests.servers.proc import free_port
from tests.servers.rabbitmq import RabbitMQ
from tests.servers.redis import Redis

HOST = "localhost"

_RABBITMQ = """
listeners.ssl.default = 127.0.0.1:{port}
ssl_options.cacertfile = {ca}
ssl_options.certfile = {cert}
ssl_options.keyfile = {key}
ssl_options.verify = verify_peer
ssl_options.fail_if_no_peer_cert = false
"""
_STRICT_LISTENER = """
{{ok, Options}} = application:get_env(rabbit, ssl_options),
rabbit_networking:start_ssl_listener({{"127.0.0.1", {port}}}, lists:keystore(fail_if_no_peer_cert, 1, Options,
  {{fail_if_no_peer_cert, true}}), 1).
"""
_REDIS = """
tls-port {port}
tls-ca-cert-file {ca}
tls-cert-file {cert}
tls-key-file {key}
tls-auth-clients optional
"""
_POSTGRES = """
ssl = on
ssl_ca_file = '{ca}'
ssl_cert_file = '{cert}'
ssl_key_file = '{key}'
"""


class EncryptedRabbitMQ(RabbitMQ):
    """A RabbitMQ with two more ports: one with TLS, and one where clients have to show a certificate too."""

    def __init__(self, authority: Authority) -> None:
        super().__init__()
        own = authority.sign("rabbitmq", f"DNS:{HOST}")
        self._tls_port, self._strict_port = free_port(), free_port()
        with (self.folder / "rabbitmq.conf").open("a") as file:
            file.write(_RABBITMQ.format(port=self._tls_port, ca=authority.ca, cert=own.cert, key=own.key))

    def start(self) -> None:
        """Start it, with all of its ports."""
        super().start()
        self.ctl("eval", _STRICT_LISTENER.format(port=self._strict_port))

    def encrypted(self, url: str, *, strict: bool = False) -> str:
        """Return the URL that leads to the same virtual host through TLS."""
        where = f"guest:guest@{HOST}:{self._strict_port if strict else self._tls_port}"
        return urlunsplit(urlsplit(url)._replace(scheme="amqps", netloc=where))


class EncryptedRedis(Redis):
    """A Redis with a port for TLS besides."""

    def __init__(self, authority: Authority) -> None:
        super().__init__()
        own = authority.sign("redis", f"DNS:{HOST}")
        self._tls_port = free_port()
        with (self.folder / "redis.conf").open("a") as file:
            file.write(_REDIS.format(port=self._tls_port, ca=authority.ca, cert=own.cert, key=own.key))

    def encrypted(self, url: str) -> str:
        """Return the URL that leads to the same database through TLS."""
        parts = urlsplit(url)
        where = f":{parts.password}@{HOST}:{self._tls_port}"
        return urlunsplit(parts._replace(scheme="rediss", netloc=where))


class EncryptedPostgres(Postgres):
    """A PostgreSQL that takes TLS, and for whose role `certified` a certificate of that name stands in for a password."""

    def __init__(self, authority: Authority) -> None:
        super().__init__()
        self._authority = authority

    def encrypted(self, url: str, **query: str) -> str:
        """Return the URL that leads to the same database by name, through TLS that is verified."""
        known = {"sslmode": "verify-full", "sslrootcert": str(self._authority.ca)} | query
        return make_url(url).set(host=HOST).update_query_dict(known).render_as_string(hide_password=False)

    def _initialise(self) -> None:
        super()._initialise()
        data = self.folder / "data"
        own = self._authority.sign("postgres", f"DNS:{HOST}").given_to(self._owner, data)
        ca = data / "authority.pem"
        ca.write_bytes(self._authority.ca.read_bytes())
        with (data / "postgresql.conf").open("a") as file:
            file.write(_POSTGRES.format(ca=ca, cert=own.cert, key=own.key))
        rules = data / "pg_hba.conf"
        rules.write_text("hostssl all certified 127.0.0.1/32 cert\n" + rules.read_text())
