"""The command `outbox-consume`: runs an application's inbox on its queue."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

import click

from outbox.cli import logs, options
from outbox.cli.exit import Command
from outbox.cli.types import DURATION
from outbox.errors import ConfigurationError
from outbox.http.health import answering
from outbox.inbox.inbox import Inbox
from outbox.inbox.runner import HANGS_S, Runner
from outbox.lifecycle import stop_on_signals
from outbox.systemd import notifying
from outbox.vitals import Vitals


@click.command(cls=Command, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.argument("inbox", metavar="MODULE:INBOX")
@options.broker_url
@options.setting("--workers", "How many messages to handle at the same time.", type=click.IntRange(1), default=1)
@options.setting(
    "--prefetch", "How many to take from the broker at a time [default: 20 more than workers].", type=click.IntRange(1)
)
@options.setting("--grace", "After SIGTERM, how long running handlers may take.", type=DURATION, default="25s")
@options.health
@options.log_level
@click.version_option(package_name="outbox-relay", prog_name="outbox-consume")
def main(
    *,
    inbox: str,
    broker_url: str,
    workers: int,
    prefetch: int | None,
    grace: float,
    health: tuple[str, int] | None,
    log_level: str,
) -> None:
    """Handle the messages of MODULE:INBOX, an `outbox.Inbox` of your application.

    The current folder is on the import path. SIGTERM or Ctrl-C stops in two phases: it takes nothing new, and finishes
    what it is handling. A second signal stops at once (exit code 130). Outages of the database and the broker are waited
    for. Exit codes: 0 stopped as asked, 2 configuration, 4 broker refused us.

    Example: outbox-consume shop.shipping:inbox --broker-url amqp://guest:guest@mq// --workers 4
    """
    logs.setup(log_level)
    stop, vitals = stop_on_signals(), Vitals(limit_s=HANGS_S)
    runner = Runner(find_inbox(inbox), broker_url, workers=workers, prefetch=prefetch, grace_s=grace, vitals=vitals)
    with answering(health, vitals, check=runner.check), notifying(vitals, stop):
        runner.run(stop)


def find_inbox(path: str) -> Inbox:
    """Import `module:attribute`, from the current folder too. Raises `ConfigurationError` when it is not an `Inbox`."""
    module, _, attribute = path.partition(":")
    if not module or not attribute:
        raise ConfigurationError(f"{path!r} does not name an inbox; write MODULE:INBOX, such as shop.shipping:inbox")
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    found: Any = _import(module)
    for name in attribute.split("."):
        found = getattr(found, name, None)
    if not isinstance(found, Inbox):
        raise ConfigurationError(f"{path!r} is no outbox.Inbox but {found!r:.80}; check the name after the colon")
    return found


def _import(module: str) -> Any:
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module}.".startswith(f"{error.name}."):
            raise  # the module is there, and something that it imports is not
        raise ConfigurationError(f"there is no module {error.name!r} here ({Path.cwd()}) or on the import path") from error


if __name__ == "__main__":
    main(prog_name="outbox-consume")
