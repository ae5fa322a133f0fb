"""`outbox-consume run`, which is also `outbox-consume MODULE:INBOX`: runs an inbox on its queue."""

from __future__ import annotations

from typing import Any

import click

from outbox.cli import inbox, logs, options
from outbox.cli.exit import Command
from outbox.cli.measuring import measuring_consumer
from outbox.cli.settings import broker_url_of
from outbox.cli.types import DURATION
from outbox.http.health import answering
from outbox.inbox.runner import HANGS_S, Runner
from outbox.lifecycle import stop_on_signals
from outbox.observe.logs import logged
from outbox.systemd import notifying
from outbox.telemetry import Telemetry
from outbox.vitals import Vitals


@click.command(cls=Command, short_help="Handle the messages of an inbox.")
@inbox.argument
@options.broker_url
@options.broker_tls
@options.setting("--workers", "How many messages to handle at the same time.", type=click.IntRange(1), default=1)
@options.setting(
    "--prefetch", "How many to take from the broker at a time [default: 20 more than workers].", type=click.IntRange(1)
)
@options.setting("--grace", "After SIGTERM, how long running handlers may take.", type=DURATION, default="25s")
@options.health
@options.log_level
@options.log_format
@click.pass_context
def run(ctx: click.Context, /, *, health: tuple[str, int] | None, log_level: str, log_format: str, **_settings: Any) -> None:
    """Handle the messages of MODULE:INBOX. The word `run` may be left out.

    SIGTERM or Ctrl-C stops in two phases: it takes nothing new, and finishes what it is handling. A second signal stops at
    once (exit code 130). Outages of the database and the broker are waited for.

    A handler past its time limit is given up, and another thread takes its place. When too many of those hang (more than 10,
    and more than workers), it ends with exit code 6: only a new process gets rid of them, so have it started again.

    Exit codes: 0 stopped as asked, 2 configuration, 4 broker refused us, 6 handlers hang past their time limits.

    Example: outbox-consume shop.shipping:inbox --broker-url amqp://guest:guest@mq// --workers 4
    """
    logs.setup(log_level, form=log_format)
    stop, vitals = stop_on_signals(), Vitals(limit_s=HANGS_S)
    consumer = inbox.find_inbox(ctx.params["path"]).consumer
    measuring = measuring_consumer(consumer, lambda: runner.look(), served=health is not None)  # noqa: PLW0108 - there is no runner yet
    runner = runner_of(ctx, vitals, logged(*measuring.subscribers))
    with answering(health, vitals, check=runner.check, metrics=measuring.answer), notifying(vitals, stop):
        runner.run(stop)


def runner_of(ctx: click.Context, vitals: Vitals | None = None, telemetry: Telemetry | None = None) -> Runner:
    """Return the consumer that the options make, not yet connected. Raises `ConfigurationError` if they cannot work."""
    given = ctx.params
    url = broker_url_of(given)
    found, workers, prefetch = inbox.find_inbox(given["path"]), given["workers"], given["prefetch"]
    return Runner(found, url, workers=workers, prefetch=prefetch, grace_s=given["grace"], vitals=vitals, telemetry=telemetry)
