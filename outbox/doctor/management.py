"""RabbitMQ's management plugin, asked over HTTP for what AMQP does not tell: bindings, and what queues are made of.

Only GET. Source of paths and names: the plugin's own documentation, which it serves at /api/index.html.
"""

from __future__ import annotations

import base64
import http.client
import json
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any
from urllib.parse import quote, unquote, urlsplit

from outbox.errors import BrokerUnavailable, ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Mapping

_TIMEOUT_S = 5.0
_QUEUE = "name,durable,auto_delete,exclusive,type,arguments,effective_policy_definition,policy,operator_policy"
_FAILED = 503


class NotTold(BrokerUnavailable):
    """The plugin does not answer, or not this user."""


@dataclass(frozen=True)
class Management:
    """The plugin of a broker, for one virtual host. What was asked once is remembered. All raise `NotTold`."""

    vhost: str
    host: str
    port: int
    tls: bool = False
    path: str = ""
    user: str = "guest"
    password: str = field(default="guest", repr=False)

    @classmethod
    def at(cls, url: str, *, vhost: str, user: str | None, password: str | None) -> Management:
        """Return the plugin at `http://user:password@host:port`; without a user there the given one asks.

        Raises `ConfigurationError` for a URL that cannot work.
        """
        try:
            where = urlsplit(url)
            port = where.port or (443 if where.scheme == "https" else 15672)
        except ValueError:
            where, port = urlsplit(""), 0
        if where.scheme not in ("http", "https") or not where.hostname:
            raise ConfigurationError("the management URL cannot be read; expected http://user:password@host:15672")
        name = unquote(where.username) if where.username else user or "guest"
        secret = unquote(where.password or "") if where.username else password or "guest"
        path = where.path.rstrip("/").removesuffix("/api")
        return cls(vhost, where.hostname, port, where.scheme == "https", path, name, secret)

    @cached_property
    def version(self) -> tuple[int, ...]:
        """The broker's version."""
        parts = str(self.get("overview")["rabbitmq_version"]).split("+")[0].split(".")
        return tuple(int(part) for part in parts if part.isdigit())

    @cached_property
    def exchanges(self) -> dict[str, dict[str, Any]]:
        """The exchanges by their names; that of the broker itself has the name ""."""
        return {each["name"]: each for each in self.get("exchanges", self.vhost)}

    @cached_property
    def queues(self) -> dict[str, dict[str, Any]]:
        """The queues by their names."""
        return {each["name"]: each for each in self.get("queues", self.vhost, query=f"columns={_QUEUE}")}

    @cached_property
    def bindings(self) -> list[dict[str, Any]]:
        """All bindings."""
        found: list[dict[str, Any]] = self.get("bindings", self.vhost)
        return found

    def policy_of(self, thing: Mapping[str, Any]) -> dict[str, Any]:
        """Return what policies make of a queue or an exchange. A plugin that keeps no statistics gives their names alone."""
        if "effective_policy_definition" in thing:
            return dict(thing["effective_policy_definition"] or {})
        found: dict[str, Any] = {}
        for kind, name in (("policies", thing.get("policy")), ("operator-policies", thing.get("operator_policy"))):
            if name:
                found |= self.get(kind, self.vhost, name)["definition"]
        return found

    def alarms(self) -> list[str]:
        """Return the alarms that make the broker take nothing, as `resource on node`."""
        found = self.get("health", "checks", "alarms", expected=(_FAILED,))
        return [f"{each.get('resource', 'an alarm')} on {each.get('node', 'a node')}" for each in found.get("alarms", [])]

    def get(self, *path: str, query: str = "", expected: tuple[int, ...] = ()) -> Any:
        """Return what is at a path below /api."""
        target = f"{self.path}/api/{'/'.join(quote(part, safe='') for part in path)}" + (f"?{query}" if query else "")
        kind = http.client.HTTPSConnection if self.tls else http.client.HTTPConnection
        connection = kind(self.host, self.port, timeout=_TIMEOUT_S)
        try:
            connection.request("GET", target, headers={"Authorization": self._authorization})
            answer = connection.getresponse()
            if answer.status != http.client.OK and answer.status not in expected:
                raise NotTold(f"the management API answers {answer.status} {answer.reason} at {target}")
            return json.loads(answer.read())
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise NotTold(f"the management API at {self.host}:{self.port}: {str(error) or type(error).__name__}") from error
        finally:
            connection.close()

    @property
    def _authorization(self) -> str:
        return "Basic " + base64.b64encode(f"{self.user}:{self.password}".encode()).decode()
