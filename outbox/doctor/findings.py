"""What a check has found: in words for people, under names that stay for machines."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable


class Level(StrEnum):
    """How much a finding matters, the worst first."""

    PROBLEM = "problem"  # messages are lost, stuck or late, or will be
    WARNING = "warning"  # works, and may not for long, or not in a failure
    INFO = "info"
    OK = "ok"
    SKIPPED = "skipped"  # does not apply here, or could not be seen


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was found: what it is, what it leads to, and the command, SQL or setting that helps."""

    level: Level
    found: str
    consequence: str = ""
    remedy: str = ""


@dataclass(frozen=True, slots=True)
class Checked:
    """One check and what it has found; nothing, when all is well."""

    name: str
    findings: tuple[Finding, ...] = ()

    @property
    def level(self) -> Level:
        """The worst level of its findings."""
        levels = {finding.level for finding in self.findings}
        return next((level for level in Level if level in levels), Level.OK)


@dataclass(frozen=True, slots=True)
class Report:
    """Every check, in the order in which they are run."""

    checks: tuple[Checked, ...]

    def count(self, level: Level) -> int:
        """Return how many findings have a level."""
        return sum(finding.level is level for check in self.checks for finding in check.findings)

    def plain(self) -> dict[str, Any]:
        """Return it as JSON can hold it."""
        checks = [
            {"name": check.name, "level": check.level, "findings": [asdict(each) for each in check.findings]}
            for check in self.checks
        ]
        return {"problems": self.count(Level.PROBLEM), "warnings": self.count(Level.WARNING), "checks": checks}


def problem(found: str, consequence: str, remedy: str) -> Finding:
    """Return a finding of the worst kind."""
    return Finding(Level.PROBLEM, found, consequence, remedy)


def warning(found: str, consequence: str, remedy: str) -> Finding:
    """Return a finding that is not one yet."""
    return Finding(Level.WARNING, found, consequence, remedy)


def info(found: str) -> Finding:
    """Return a finding that asks for nothing."""
    return Finding(Level.INFO, found)


def skipped(reason: str) -> Finding:
    """Return what stands for a check that was not made."""
    return Finding(Level.SKIPPED, reason)


def some(names: Iterable[object], most: int = 5) -> str:
    """Return the first few of some names, and how many more there are."""
    listed = [str(name) for name in names]
    more = f" and {len(listed) - most} more" if len(listed) > most else ""
    return ", ".join(listed[:most]) + more


def span(seconds: float) -> str:
    """Return a time for people: in seconds, minutes, hours or days."""
    for unit, length in (("days", 86_400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * length:
            return f"{seconds / length:.0f} {unit}"
    return f"{seconds:.1f} s" if seconds < 10 else f"{seconds:.0f} s"
