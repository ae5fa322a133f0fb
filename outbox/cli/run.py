"""`outbox-relay run`: the relay itself."""

from __future__ import annotations

import gc
from typing import Any

import click

from outbox.cli import config, logs, options
from outbox.cli.exit import Command
from outbox.cli.measuring import measuring_relay
from outbox.cli.settings import settings_of
from outbox.cli.types import DURATION, WholeNumber
from outbox.http.health import answering
from outbox.lifecycle import stop_on_signals
from outbox.observe.logs import logged
from outbox.relay.readiness import database_check
from outbox.relay.service import run_relay
from outbox.settings import MOST_AT_ONCE
from outbox.states import OnDead
from outbox.systemd import notifying
from outbox.vitals import Vitals
from outbox.wire import Format


@click.command(cls=Command)
@config.option
@options.database_url
@options.broker_url
@options.broker_tls
@options.schema
@options.setting(
    "--lease", "How long a relay may hold a partition without an answer from the broker.", default="30s", type=DURATION
)
@options.setting("--confirm-timeout", "How long the broker may be silent with messages in flight.", default="20s", type=DURATION)
@options.setting("--poll-interval", "The longest pause between two looks at an empty table.", default="500ms", type=DURATION)
@options.setting(
    "--wake",
    "Hear there that a producer has committed (outbox.wake_relay), and look at once: udp://127.0.0.1:7411, "
    "unix:///run/outbox/relay.sock, or postgres (LISTEN), each relay at an address of its own. Then a poll interval "
    "of 2s is sensible: it is how late a message is whose wake-up was lost, that is due later, or that an operator retries "
    "[default: off].",
    metavar="ADDRESS",
)
@options.url(
    "--wake-database-url",
    "For --wake postgres: a direct URL to listen on, where --database-url leads through a transaction pooler (PgBouncer).",
    required=False,
)
@options.setting("--batch-size", "How many messages to claim at once.", default=1000, type=WholeNumber(1, MOST_AT_ONCE))
@options.setting("--grace", "After SIGTERM, how long to wait for what is in flight.", default="20s", type=DURATION)
@options.setting("--max-attempts", "Give a message up after so many failures of its own.", default=20, type=WholeNumber(1))
@options.setting(
    "--retry-first", "The longest delay before a message's second try; doubles with every failure.", default="1s", type=DURATION
)
@options.setting("--retry-ceiling", "The longest delay between two tries of a message.", default="5m", type=DURATION)
@options.setting("--max-age", "Give a message up at a failure of its own that finds it older than this.", type=DURATION)
@options.setting(
    "--on-dead",
    "What later messages of a dead one's key do: block (wait for an operator), skip (go on) or park (die with it).",
    default="block",
    type=click.Choice([each.value for each in OnDead]),
)
@options.setting(
    "--retention", "How long to keep messages that were sent, e.g. 7d. Without it they are deleted at once.", type=DURATION
)
@options.setting(
    "--inbox-retention",
    "How long to keep the records of handled messages in this database, e.g. 30d (default: for ever). A message that is "
    "delivered again after that is handled again: it must be longer than all retries of a message, and than what may "
    "pass before a message comes back from a queue, a dead-letter queue, an outage or an operator.",
    type=DURATION,
)
@options.setting("--allow-unconfirmed", "Use a transport that cannot tell whether messages arrive.", default=False, is_flag=True)
@options.setting(
    "--format",
    "Publish messages with the outbox's own headers (outbox), as CloudEvents with their attributes in headers too (cloudevents), "
    "or as CloudEvents in JSON around the payload (cloudevents-structured). A [[routes]] table may say another for its topics.",
    default=Format.OUTBOX.value,
    type=click.Choice([each.value for each in Format]),
)
@options.setting(
    "--source", "Which application CloudEvents say they come from: a URI or a path, such as /shop. They need one.", metavar="URI"
)
@options.health
@options.log_level
@options.log_format
@click.pass_context
def run(ctx: click.Context, /, *, health: tuple[str, int] | None, log_level: str, log_format: str, **_settings: Any) -> None:
    """Publish what was committed, until stopped.

    SIGTERM or Ctrl-C stops in two phases: what is in flight is finished, then the leases are given back. A second
    signal stops at once (exit code 130). Outages of the database and the broker are waited for. Exit codes: 0 stopped
    as asked, 2 configuration, 3 database unreachable at the start, 4 broker refused us, 5 tables missing or old.

    Example: outbox-relay run --database-url postgresql://app@db/shop --broker-url amqp://guest:guest@mq//
    """
    settings = settings_of(ctx)
    logs.setup(log_level, form=log_format)
    stop, vitals = stop_on_signals(), Vitals(limit_s=settings.lease_s)
    with (
        database_check(settings) as check,
        measuring_relay(settings, served=health is not None) as measuring,
        answering(health, vitals, check=check, metrics=measuring.answer),
        notifying(vitals, stop),
    ):
        _collect_rarely()
        run_relay(settings, stop, vitals=vitals, telemetry=logged(*measuring.subscribers))


def _collect_rarely() -> None:
    """Let the garbage collector leave alone what is loaded, and look at a batch's rows once: references free nearly all of them."""
    gc.freeze()
    gc.set_threshold(10_000, 50, 50)
