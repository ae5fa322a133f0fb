"""Says how a demo ended: the ledger, and what was seen."""

from __future__ import annotations

from typing import TYPE_CHECKING

from outbox.demo.ledger import MUST_BE_ZERO
from outbox.errors import OutboxError

if TYPE_CHECKING:
    from outbox.demo.display import Display
    from outbox.demo.ledger import Ledger
    from outbox.demo.run import Ended

_WIDTH = 32


def write_ledger(display: Display, ledger: Ledger) -> None:
    """Write the ledger, a line for each number, and mark what must be zero."""
    display.write()
    for name, value in ledger.lines.items():
        line = f"{name.replace('_', ' '):<{_WIDTH}}{value:>8,}"
        if name in MUST_BE_ZERO:
            line += display.paint("  WRONG, must be 0", "red", bold=True) if value else display.paint("  ok", "green")
        display.write(line)
    display.write()


class DemoFailed(OutboxError):
    """The ledger does not balance, or not everything was done in time."""


def judge(ledger: Ledger, ended: Ended) -> None:
    """Raise `DemoFailed`, which says what is wrong, unless all was done in time and the ledger balances."""
    problems = [f"not done in time, left are {ended.left}"] if ended.left else []
    if ledger.wrong:
        lines = ", ".join(f"{name.replace('_', ' ')} {ledger.lines[name]}" for name in ledger.wrong)
        problems.append(f"the ledger does not balance: {lines}")
    if problems:
        raise DemoFailed("; ".join(problems))


def write_lesson(display: Display, ledger: Ledger, ended: Ended) -> None:
    """Write what was seen, and what to do next."""
    if ended.kills:
        times = "once" if ended.kills == 1 else f"{ended.kills} times"
        display.write(f"The relay was killed {times} with messages in the broker that the outbox did not yet know to be sent:")
        display.write(f"{ledger.published_more_than_once:,} were published again, and the inbox dropped what came twice.")
    display.write("Every order that was committed was shipped, once, and none that was rolled back.")
    display.write("Next: `outbox-relay --help`, and the README for your own tables and your own broker.")
