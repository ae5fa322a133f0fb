"""RabbitMQ for the tests: `with RabbitMQ() as rabbit:`, and an empty virtual host for each test."""

import base64
import json
import os
import secrets
import signal
import subprocess
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import ClassVar
from urllib.parse import quote, unquote, urlsplit, urlunsplit

import amqp

from tests.servers.proc import PrivateServer, find_program, free_port

URL_VARIABLE = "OUTBOX_TEST_RABBITMQ_URL"
MANAGEMENT_URL_VARIABLE = "OUTBOX_TEST_RABBITMQ_MANAGEMENT_URL"

CONFIGURATION = """
listeners.tcp.default = 127.0.0.1:{port}
"""
# Its metrics are off, so that it takes nothing from the benchmarks.
MANAGEMENT_CONFIGURATION = """
management.tcp.ip = 127.0.0.1
management.tcp.port = {management_port}
management_agent.disable_metrics_collector = true
"""
LOOPBACK_ONLY = "-kernel inet_dist_use_interface {127,0,0,1}"


class VirtualHosts:
    """Makes and drops virtual hosts on the broker that the URLs name."""

    def __init__(self, url: str, management_url: str | None) -> None:
        self.url = url
        self._management_url = management_url

    @property
    def management_url(self) -> str:
        """The URL of the management plugin; "" without it."""
        return self._management_url or ""

    def create_vhost(self) -> str:
        """Create a new empty virtual host and return its URL; without a management URL, that of the given one."""
        if self._management_url is None:
            return self.url
        name = f"test-{secrets.token_hex(6)}"
        self._add(name)
        return urlunsplit(urlsplit(self.url)._replace(path=f"/{name}"))

    def drop_vhost(self, url: str) -> None:
        """Drop a virtual host that `create_vhost` made, with its queues and connections."""
        if url != self.url:
            self._remove(unquote(urlsplit(url).path.removeprefix("/")))

    def _add(self, vhost: str) -> None:
        self._request("PUT", vhost)

    def _remove(self, vhost: str) -> None:
        self._request("DELETE", vhost)

    def _request(self, method: str, vhost: str) -> None:
        where = urlsplit(self._management_url or "")
        credentials = f"{unquote(where.username or 'guest')}:{unquote(where.password or 'guest')}"
        request = urllib.request.Request(
            f"{where.scheme}://{where.hostname}:{where.port}{where.path.rstrip('/')}/api/vhosts/{quote(vhost, safe='')}",
            method=method,
            headers={"Authorization": "Basic " + base64.b64encode(credentials.encode()).decode()},
        )
        with urllib.request.urlopen(request, timeout=30):
            pass


class RabbitMQ(PrivateServer, VirtualHosts):
    """A private RabbitMQ node on 127.0.0.1, with its own epmd and folder; also runs as root.

    With the management plugin it makes a virtual host in 20 ms instead of 450, but takes 6 s instead of 1 to stop
    in good order: worth it for a node that many tests share and none restarts.
    """

    name: ClassVar[str] = "rabbitmq"
    kill_signal: ClassVar[signal.Signals] = signal.SIGKILL
    _not_ready = (OSError, amqp.AMQPError)

    def __init__(self, *, management: bool = False) -> None:
        PrivateServer.__init__(self)
        self.port, self._distribution_port, self._epmd_port, management_port = (free_port() for _ in range(4))
        url = f"amqp://guest:guest@127.0.0.1:{self.port}//"
        VirtualHosts.__init__(self, url, management_url=f"http://guest:guest@127.0.0.1:{management_port}")
        self._management = management
        self._epmd: subprocess.Popen[bytes] | None = None
        configuration = CONFIGURATION + MANAGEMENT_CONFIGURATION if management else CONFIGURATION
        (self.folder / "plugins").write_text("[rabbitmq_management].\n" if management else "[].\n")
        (self.folder / "rabbitmq.conf").write_text(configuration.format(port=self.port, management_port=management_port))

    def stop(self) -> None:
        """Stop the node in good order."""
        self._end(signal.SIGTERM)

    def ctl(self, *arguments: str, stdin: str = "") -> str:
        """Run rabbitmqctl on this node and return what it printed."""
        command = [str(_script("rabbitmqctl")), *arguments]
        done = subprocess.run(command, env=self._environment(), check=False, input=stdin, capture_output=True, text=True)
        if done.returncode != 0:
            raise RuntimeError(f"rabbitmqctl {' '.join(arguments)} failed:\n{done.stdout}{done.stderr}")
        return done.stdout

    def close(self) -> None:
        """End the node for good, with its epmd and folder."""
        super().close()
        if self._epmd is not None:
            self._epmd.kill()
            self._epmd.wait()

    def _add(self, vhost: str) -> None:
        if self._management:
            super()._add(vhost)
        else:
            # One call in place of add_vhost and set_permissions: each costs the start of an Erlang machine.
            rights = {"user": "guest", "vhost": vhost, "configure": ".*", "write": ".*", "read": ".*"}
            self.ctl("import_definitions", stdin=json.dumps({"vhosts": [{"name": vhost}], "permissions": [rights]}))

    def _remove(self, vhost: str) -> None:
        if self._management:
            super()._remove(vhost)
        else:
            self.ctl("delete_vhost", vhost)

    def _launch(self) -> subprocess.Popen[bytes]:
        environment = self._environment()
        if self._epmd is None:
            command = ["epmd", "-address", "127.0.0.1", "-port", str(self._epmd_port)]
            self._epmd = self._spawn(command, env=environment)
        return self._spawn([_script("rabbitmq-server")], env=environment)

    def _watch(self, *pids: int) -> None:
        super()._watch(*pids, *([self._epmd.pid] if self._epmd and pids else []))

    def _connect(self) -> None:
        with amqp.Connection(f"127.0.0.1:{self.port}", connect_timeout=5):
            pass

    def _environment(self) -> dict[str, str]:
        inherited = {name: value for name, value in os.environ.items() if not name.startswith(("RABBITMQ", "ERL"))}
        return inherited | {
            "HOME": str(self.folder),  # where Erlang keeps the cookie that rabbitmqctl shares with the node
            "ERL_EPMD_ADDRESS": "127.0.0.1",
            "ERL_EPMD_PORT": str(self._epmd_port),
            "RABBITMQ_NODENAME": "outbox@localhost",
            "RABBITMQ_NODE_PORT": str(self.port),
            "RABBITMQ_DIST_PORT": str(self._distribution_port),
            "RABBITMQ_MNESIA_BASE": str(self.folder / "data"),
            "RABBITMQ_LOG_BASE": str(self.folder / "log"),
            "RABBITMQ_CONFIG_FILE": str(self.folder / "rabbitmq.conf"),
            "RABBITMQ_CONF_ENV_FILE": str(self.folder / "absent"),
            "RABBITMQ_ADVANCED_CONFIG_FILE": str(self.folder / "absent.config"),
            "RABBITMQ_ENABLED_PLUGINS_FILE": str(self.folder / "plugins"),
            "RABBITMQ_SERVER_ADDITIONAL_ERL_ARGS": LOOPBACK_ONLY,
            "RABBITMQ_CTL_ERL_ARGS": LOOPBACK_ONLY,
            # Makes the start script become the node itself, so that signals reach it.
            "RUNNING_UNDER_SYSTEMD": "true",
        }


@contextmanager
def rabbitmq_server() -> Iterator[VirtualHosts]:
    """The broker that OUTBOX_TEST_RABBITMQ_URL names, else a private one."""
    if url := os.environ.get(URL_VARIABLE):
        yield VirtualHosts(url, os.environ.get(MANAGEMENT_URL_VARIABLE))
    else:
        with RabbitMQ(management=True) as private:
            yield private


def _script(name: str) -> Path:
    """The package's inner script: the one on PATH switches to the user rabbitmq."""
    inner = Path("/usr/lib/rabbitmq/bin") / name
    return inner if inner.exists() else find_program(name)
