"""Shows the demo as it runs: a few lines that are redrawn on a terminal, else a line about once a second."""

from __future__ import annotations

import os
import shutil
from time import monotonic
from typing import TYPE_CHECKING, TextIO

import click

if TYPE_CHECKING:
    from outbox.demo.watch import View

_BAR = 24
_REDRAW_S = 0.1
_LINE_S = 1.0


class Display:
    """Writes what happens to a stream; a terminal also gets bars, in colour unless NO_COLOR is set."""

    def __init__(self, stream: TextIO, *, orders: int) -> None:
        self._stream = stream
        self._orders = orders
        self._live = stream.isatty() and os.environ.get("TERM") != "dumb"
        self._colour = self._live and not os.environ.get("NO_COLOR")
        self._blocks = ("█", "░") if "utf" in (stream.encoding or "").lower() else ("#", ".")
        self._started_at = monotonic()
        self._drawn_at = 0.0
        self._drawn: list[str] = []

    def show(self, view: View) -> None:
        """Show the numbers, if it is time to."""
        if monotonic() - self._drawn_at < (_REDRAW_S if self._live else _LINE_S):
            return
        self._drawn_at = monotonic()
        if self._live:
            self._redraw(self._bars(view))
        else:
            self.write(self._stamp(_summary(view)))

    def say(self, text: str, *, colour: str | None = None) -> None:
        """Say that something happened, above the bars."""
        bars = self._drawn
        self._redraw([])
        self.write(self._stamp(self.paint(text, colour)))
        self._redraw(bars)

    def end(self, view: View) -> None:
        """Show the last numbers, and leave them there."""
        self._drawn_at = 0.0
        self.show(view)
        self._drawn = []

    def write(self, text: str = "") -> None:
        """Write a line of text."""
        self._stream.write(f"{text}\n")
        self._stream.flush()

    def paint(self, text: str, colour: str | None, *, bold: bool = False) -> str:
        """Return the text in a colour, where colours are wanted."""
        return click.style(text, fg=colour, bold=bold or None) if self._colour and (colour or bold) else text

    def _bars(self, view: View) -> list[str]:
        again = f"{view.published_again:,} again" if view.published_again else ""
        to_ship = self._orders - view.rolled_back
        return [
            self._bar("orders", view.committed + view.rolled_back, self._orders, f"{view.rolled_back:,} rolled back", "cyan"),
            self._bar("published", view.published, to_ship, f"{view.in_flight:,} in flight  {again}", "yellow"),
            self._bar("shipped", view.shipped, to_ship, f"{view.in_broker:,} in the broker", "green"),
        ]

    def _bar(self, name: str, done: int, whole: int, note: str, colour: str) -> str:
        filled = min(_BAR, _BAR * done // whole) if whole else _BAR
        full, empty = self._blocks
        bar = self.paint(full * filled, colour) + self.paint(empty * (_BAR - filled), "bright_black")
        # Longer than the terminal is wide, a line would wrap, and the lines above it would not be overwritten.
        room = max(0, shutil.get_terminal_size().columns - _BAR - 22)
        return f"{name:<10} {bar} {done:>7,}  {note[:room]}"

    def _redraw(self, lines: list[str]) -> None:
        if self._drawn:
            self._stream.write(f"\x1b[{len(self._drawn)}A\x1b[J")
        self._stream.writelines(f"{line}\n" for line in lines)
        self._stream.flush()
        self._drawn = lines

    def _stamp(self, text: str) -> str:
        return f"{monotonic() - self._started_at:5.1f} s  {text}"


def _summary(view: View) -> str:
    placed = view.committed + view.rolled_back
    return (
        f"orders {placed:,} ({view.rolled_back:,} rolled back)  published {view.published:,} ({view.published_again:,} again)  "
        f"in flight {view.in_flight:,}  shipped {view.shipped:,}"
    )
