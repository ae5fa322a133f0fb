"""`outbox-relay doctor`: looks for what has gone wrong elsewhere, and says what to do."""

from __future__ import annotations

import json
from typing import Any

import click

from outbox import urls
from outbox.backoff import Backoff
from outbox.broker import tls
from outbox.cli import config, options
from outbox.cli.diagnosis import page
from outbox.cli.exit import FOUND, Command
from outbox.cli.types import DURATION, WholeNumber
from outbox.doctor.checks import NAMES
from outbox.doctor.findings import Level
from outbox.doctor.run import examine
from outbox.doctor.scope import Scope
from outbox.states import RetryPolicy
from outbox.wire import Format


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
@options.setting("--inbox-retention", "As the relay has it.", type=DURATION)
@options.setting("--lease", "As the relay has it.", type=DURATION, default="30s")
@options.setting("--poll-interval", "As the relay has it.", type=DURATION, default="500ms")
@options.setting("--max-attempts", "As the relay has it.", type=WholeNumber(1))
@options.setting("--retry-first", "As the relay has it.", type=DURATION)
@options.setting("--retry-ceiling", "As the relay has it.", type=DURATION)
@options.setting("--max-age", "As the relay has it.", type=DURATION)
@options.setting("--allow-unconfirmed", "As the relay has it.", is_flag=True, default=False)
@options.setting("--wake", "As the relay has it.", metavar="ADDRESS")
@options.url("--wake-database-url", "As the relay has it.", required=False)
@options.setting(
    "--format", "As the relay has it.", default=Format.OUTBOX.value, type=click.Choice([each.value for each in Format])
)
@options.setting("--source", "As the relay has it.", metavar="URI")
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


def _broker_url(told: dict[str, Any]) -> str | None:
    url = told["broker_url"]
    return url and urls.current(tls.with_files(url, ca=told["broker_ca"], cert=told["broker_cert"], key=told["broker_key"]))


def _scope(ctx: click.Context, skip: frozenset[str], told: dict[str, Any]) -> Scope:
    usual = RetryPolicy()
    policy = RetryPolicy(
        max_attempts=told["max_attempts"] or usual.max_attempts,
        backoff=Backoff(
            first_s=usual.backoff.first_s if told["retry_first"] is None else told["retry_first"],
            ceiling_s=usual.backoff.ceiling_s if told["retry_ceiling"] is None else told["retry_ceiling"],
        ),
        max_age_s=told["max_age"],
    )
    return Scope(
        database_url=told["database_url"],
        broker_url=_broker_url(told),
        management_url=told["management_url"],
        schema=told["schema"],
        routes=config.routes_of(ctx, form=Format(told["format"]), source=told["source"]),
        policies=config.policies_of(ctx, policy),
        lease_s=told["lease"],
        poll_interval_s=told["poll_interval"],
        inbox_retention_s=told["inbox_retention"],
        allow_unconfirmed=told["allow_unconfirmed"],
        wake=told["wake"],
        wake_database_url=told["wake_database_url"],
        skip=skip,
    )
