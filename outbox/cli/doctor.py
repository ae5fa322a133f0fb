"""`outbox-relay doctor`: looks for what has gone wrong elsewhere, and says what to do."""

from __future__ import annotations

import json
from copy import copy
from typing import Any

import click

from outbox import urls
from outbox.cli import config, options
from outbox.cli.diagnosis import page
from outbox.cli.exit import FOUND, Command
from outbox.cli.run import run
from outbox.cli.settings import broker_url_of, policy_of
from outbox.doctor.checks import NAMES
from outbox.doctor.findings import Level
from outbox.doctor.run import examine
from outbox.doctor.scope import Scope
from outbox.wire import Format

_OF_THE_RELAY = (
    "inbox_retention", "lease", "poll_interval", "max_attempts", "retry_first", "retry_ceiling", "max_age", "on_dead",
    "allow_unconfirmed", "wake", "wake_database_url", "wake_database_url_file", "format", "source",
)  # fmt: skip


@click.command(cls=Command)
@config.option
@options.database_url
@options.url("--broker-url", "The broker; without it nothing is asked of one.", required=False)
@options.broker_tls
@options.schema
@options.setting(
    "--management-url",
    "RabbitMQ's management plugin, e.g. http://user:password@host:15672; only it knows what queues are bound, and made of. "
    "Without a user it is asked as the broker URL's.",
    metavar="URL",
)
@click.option("--skip", multiple=True, type=click.Choice(NAMES), metavar="CHECK", help="Leave a check out; may be repeated.")
@click.option("--strict", is_flag=True, help="Count warnings as problems.")
@options.as_json
@click.pass_context
def doctor(ctx: click.Context, /, *, as_json: bool, strict: bool, skip: tuple[str, ...], **told: Any) -> None:
    """Look at database, broker, relays and messages, and say what is wrong, what follows, and what to do.

    It changes nothing and publishes nothing. Give it what the relay is given (--config), and its database URL: rights and
    settings are those of the role that asks. No check takes longer than a few seconds, also if a server hangs; one that cannot be
    made says so. Exit codes: 0 nothing to do, 6 problems (with --strict also warnings), 2 configuration.

    Example: outbox-relay doctor --config relay.toml --management-url http://monitor:secret@mq:15672
    """
    report = examine(_scope(ctx, frozenset(skip), told))
    click.echo(json.dumps(report.plain()) if as_json else "\n".join(page(report)))
    if report.count(Level.PROBLEM) or (strict and report.count(Level.WARNING)):
        ctx.exit(FOUND)


def _scope(ctx: click.Context, skip: frozenset[str], told: dict[str, Any]) -> Scope:
    return Scope(
        database_url=told["database_url"],
        broker_url=urls.current(broker_url_of(told)) if told["broker_url"] else None,
        management_url=told["management_url"],
        schema=told["schema"],
        routes=config.routes_of(ctx, form=Format(told["format"]), source=told["source"]),
        policies=config.policies_of(ctx, policy_of(told)),
        lease_s=told["lease"],
        poll_interval_s=told["poll_interval"],
        inbox_retention_s=told["inbox_retention"],
        allow_unconfirmed=told["allow_unconfirmed"],
        wake=told["wake"],
        wake_database_url=told["wake_database_url"],
        skip=skip,
    )


def _as_the_relay_has_it(option: Any) -> Any:
    own = copy(option)
    own.help = "As the relay has it."
    return own


doctor.params += [_as_the_relay_has_it(each) for each in run.params if each.name in _OF_THE_RELAY]
