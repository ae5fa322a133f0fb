"""`python -m outbox` is `outbox-relay`."""

from outbox.cli import main

main(prog_name="outbox-relay")
