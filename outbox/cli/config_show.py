"""`outbox-relay config show`: every value of the relay's configuration, and where it came from."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click

from outbox.cli import config
from outbox.cli.exit import Group
from outbox.cli.run import run
from outbox.cli.settings import settings_of
from outbox.cli.showing import FIRST_ERROR, show_command
from outbox.errors import OutboxError
from outbox.relay.service import check

if TYPE_CHECKING:
    from outbox.states import RetryPolicy

_HELP = """Print every value of the relay's configuration, and where it came from.

Takes the options of `outbox-relay run`, of the command line, the environment and the file. Passwords are hidden. Connects to
nothing. With a configuration that cannot work it prints the values all the same, says what `run` would say, and ends with exit code 2.

Example: outbox-relay config show --config relay.toml
"""


@click.group("config", cls=Group)
def config_group() -> None:
    """Look at the relay's configuration."""


def _tables(ctx: click.Context) -> dict[str, Any]:
    """Return routes and policies with their defaults, or as they were written if nothing can be made of them."""
    if FIRST_ERROR in ctx.meta:
        return config.written(ctx)
    try:
        settings = settings_of(ctx)
    except OutboxError:
        return config.written(ctx)
    policies = (*settings.policies.by_topic, ("#", settings.policies.default))
    return {
        "routes": [asdict(each) for each in settings.routes.all],
        "policies": [_policy(topics, policy) for topics, policy in policies],
    }


def _policy(topics: str, policy: RetryPolicy) -> dict[str, Any]:
    return {
        "topics": topics,
        "max_attempts": policy.max_attempts,
        "retry_first_s": policy.backoff.first_s,
        "retry_ceiling_s": policy.backoff.ceiling_s,
        "max_age_s": policy.max_age_s,
        "on_dead": policy.on_dead,
    }


config_group.add_command(show_command(run, "show", _HELP, check=lambda ctx: check(settings_of(ctx)), more=_tables))
