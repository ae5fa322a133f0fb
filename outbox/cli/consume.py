"""The command `outbox-consume`: runs an application's inbox, and looks after what it could not handle."""

from __future__ import annotations

import click

from outbox.cli.consume_dead import dead
from outbox.cli.consume_handlers import handlers
from outbox.cli.consume_run import run, runner_of
from outbox.cli.consume_status import status
from outbox.cli.exit import Group
from outbox.cli.showing import show_command

_OF_THE_GROUP = ("-h", "--help", "--version")


class _RunByDefault(Group):
    """A group in which `MODULE:INBOX ...` is `run MODULE:INBOX ...`, with its options before or behind."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Put `run` in front of what is no command, and no option of the group itself."""
        return super().parse_args(ctx, ["run", *args] if args and self._is_for_run(args[0], *args[1:2]) else args)

    def _is_for_run(self, first: str, second: str = "--") -> bool:
        if first in self.commands or first in _OF_THE_GROUP:
            return False
        # What is followed by an inbox is meant as a command, and click knows which ones are spelled like it.
        return ":" in first or first.startswith("-") or second.startswith("-")

    def format_usage(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Say both forms."""
        formatter.write_usage(ctx.command_path, "MODULE:INBOX [OPTIONS of run]")
        formatter.write_usage(ctx.command_path, "COMMAND MODULE:INBOX [OPTIONS]", prefix="       ")


@click.group(cls=_RunByDefault, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.version_option(package_name="outbox-relay", prog_name="outbox-consume")
def main() -> None:
    """Handle the messages of an `outbox.Inbox` of your application, and look after those that it could not handle.

    MODULE:INBOX is where it is, such as shop.shipping:inbox; the current folder is on the import path. Without a command it
    is run on its queue: see outbox-consume run --help. The other commands need no broker, only the database of the inbox's
    own sessions.

    \b
    Exit codes: 0 done, or stopped as asked   3 the database cannot be reached (run waits for it)
                1 failed                      4 the broker refused us
                2 usage or configuration      5 the outbox tables are missing, or older than needed
                                              6 handlers hang past their time limits: start the process again

    \b
    Example: outbox-consume shop.shipping:inbox --broker-url amqp://guest:guest@mq// --workers 4
             outbox-consume dead list shop.shipping:inbox --since 2h
    """


_CONFIG = """Print every option of `run`, and where its value came from.

Passwords are hidden. Connects to nothing. With a configuration that cannot work it prints the values all the same, says what `run`
would say, and ends with exit code 2.

Example: outbox-consume config shop.shipping:inbox
"""

for command in (run, status, dead, handlers, show_command(run, "config", _CONFIG, check=runner_of)):
    main.add_command(command)

if __name__ == "__main__":
    main(prog_name="outbox-consume")
