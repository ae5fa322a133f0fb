"""What `outbox-relay doctor` has found, as one page."""

from __future__ import annotations

import textwrap
from typing import TYPE_CHECKING

from outbox.cli.printing import printable
from outbox.doctor.findings import Level

if TYPE_CHECKING:
    from collections.abc import Iterator

    from outbox.doctor.findings import Finding, Report

_WIDTH = 110
_INDENT = " " * 9


def page(report: Report) -> Iterator[str]:
    """Give the lines: what was found at length, the worst first, and what is well in a line."""
    for level in (Level.PROBLEM, Level.WARNING, Level.INFO):
        for check in report.checks:
            for finding in check.findings:
                if finding.level is level:
                    yield from _paragraph(check.name, finding)
    well = [check.name for check in report.checks if check.level is Level.OK]
    yield from _lines(f"{Level.OK:<8} ", ", ".join(well) or "nothing")
    yield from _skipped(report)
    yield f"{_counted(report.count(Level.PROBLEM), 'problem')}, {_counted(report.count(Level.WARNING), 'warning')}"


def _paragraph(name: str, finding: Finding) -> Iterator[str]:
    yield from _lines(f"{finding.level:<8} {name}: ", finding.found)
    for word, text in (("so: ", finding.consequence), ("do: ", finding.remedy)):
        if text:
            yield from _lines(_INDENT + word, text)


def _skipped(report: Report) -> Iterator[str]:
    reasons: dict[str, list[str]] = {}
    for check in report.checks:
        for finding in check.findings:
            if finding.level is Level.SKIPPED:
                reasons.setdefault(finding.found, []).append(check.name)
    for reason, names in reasons.items():
        yield from _lines(f"{Level.SKIPPED:<8} ", f"{', '.join(names)} ({reason})")


def _lines(head: str, text: str) -> list[str]:
    shown = head + printable(text)
    return textwrap.wrap(shown, _WIDTH, subsequent_indent=_INDENT, break_long_words=False, break_on_hyphens=False)


def _counted(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"
