"""The command `outbox-relay`."""

from __future__ import annotations

import click

from outbox.cli.config_show import config_group
from outbox.cli.dead import dead
from outbox.cli.demo import demo
from outbox.cli.doctor import doctor
from outbox.cli.exit import Group
from outbox.cli.messages import messages
from outbox.cli.pause import pause, resume
from outbox.cli.run import run
from outbox.cli.schema import schema
from outbox.cli.status import status


@click.group(cls=Group, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.version_option(package_name="outbox-relay", prog_name="outbox-relay")
def main() -> None:
    """Publishes what applications have committed to their outbox."""


for command in (run, config_group, status, doctor, messages, dead, pause, resume, schema, demo):
    main.add_command(command)
