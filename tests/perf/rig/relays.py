"""Relays as real processes, with their defaults."""

import os
from pathlib import Path

from tests.faults.processes import Program

_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


def relay(name: str, database_url: str, broker_url: str, *options: str) -> Program:
    """Return a relay, not started."""
    environment = {"OUTBOX_DATABASE_URL": database_url, "OUTBOX_BROKER_URL": broker_url}
    return Program(name, ("-m", "outbox", "run", *options), environment, ready="relay started")


def require_alive(program: Program) -> None:
    """Raise if the process has ended."""
    if program.process.poll() is not None:
        raise RuntimeError(f"{program.name} has ended:\n{program.log}")


def stop(program: Program) -> None:
    """Stop it in order. Raises if it failed."""
    if program.terminate() != 0:
        raise RuntimeError(f"{program.name} failed:\n{program.log}")


def cpu_s(program: Program) -> float:
    """Return how many seconds of the processor it has used so far (Linux)."""
    fields = Path(f"/proc/{program.process.pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / _TICKS_PER_S
