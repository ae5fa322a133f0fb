"""Outgoing HTTP calls as values: what was sent, what is answered, and which of them were one too many."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

_HARMLESS = ("GET", "HEAD", "OPTIONS", "TRACE")  # RFC 9110, 9.2.1: safe methods ask for nothing to be changed


@dataclass(frozen=True, slots=True)
class Call:
    """One HTTP request that a handler made. Header names are in lower case."""

    method: str
    url: str
    headers: Mapping[str, str] = field(default_factory=dict)
    body: bytes = b""

    @property
    def is_harmless(self) -> bool:
        """The method is one that only reads (GET, HEAD, OPTIONS, TRACE)."""
        return self.method in _HARMLESS


@dataclass(frozen=True, slots=True)
class Answer:
    """What the other system says to a `Call`."""

    status: int = 200
    body: bytes = b"{}"
    headers: Mapping[str, str] = field(default_factory=lambda: {"content-type": "application/json"})


@dataclass(frozen=True, slots=True, kw_only=True)
class CallRules:
    """Which calls may be repeated: those with the same value in `key_header`, and those that `repeatable` selects."""

    key_header: str
    repeatable: Callable[[Call], bool]

    def key_of(self, call: Call) -> str | None:
        """Return the idempotency key of a call, if it has one."""
        return call.headers.get(self.key_header.lower())

    def effects(self, calls: Sequence[Call]) -> list[Call]:
        """Return the calls that have an effect: without what may be repeated, and one of those that have the same key."""
        first: dict[tuple[str, str, str], Call] = {}
        effects = []
        for call in calls:
            if call.is_harmless or self.repeatable(call):
                continue
            key = self.key_of(call)
            if key is None or first.setdefault((call.method, call.url, key), call) is call:
                effects.append(call)
        return effects

    def problems(self, expected: Sequence[Call], found: Sequence[Call]) -> list[str]:
        """Return one line for each kind of call that was made too often, not at all, or under one key with two bodies."""
        wanted, made = Counter(map(_name, self.effects(expected))), Counter(map(_name, self.effects(found)))
        lines = [
            f"HTTP: {name} had an effect {made[name]} times, expected {wanted[name]}; {self._keys(name, found)}"
            for name in {**wanted, **made}
            if wanted[name] != made[name]
        ]
        return lines + self._changed_bodies(found)

    def _keys(self, name: str, calls: Sequence[Call]) -> str:
        keys = [self.key_of(call) for call in calls if _name(call) == name]
        sent = ", ".join("none" if key is None else key for key in keys)
        return f"{self.key_header} of each call: {sent}" if sent else "it was not made"

    def _changed_bodies(self, calls: Sequence[Call]) -> list[str]:
        bodies: dict[tuple[str, str], set[bytes]] = {}
        for call in calls:
            key = self.key_of(call)
            if key is not None and not call.is_harmless:
                bodies.setdefault((_name(call), key), set()).add(call.body)
        return [
            f"HTTP: {name} was repeated with the same {self.key_header} {key} and another body, which the other system may refuse"
            for (name, key), different in bodies.items()
            if len(different) > 1
        ]


def _name(call: Call) -> str:
    return f"{call.method} {call.url}"
