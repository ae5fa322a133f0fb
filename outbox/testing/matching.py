"""Compares what is in the outbox with what a test wants there, and says what differs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from outbox.errors import InvalidEvent
from outbox.events import Event

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from outbox.testing.events import Enqueued

_MOST_LISTED = 20
_LONGEST = 300


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """The parts of an event that are asked for; `...` where anything will do."""

    topic: str
    key: object = ...
    payload: object = ...
    headers: Any = ...

    def mismatches(self, found: Enqueued) -> list[str]:
        """Return in words what of an event is not as wanted."""
        return list(self._mismatches(found))

    def _mismatches(self, found: Enqueued) -> Iterator[str]:
        if found.topic != self.topic:
            yield f"topic is {found.topic!r}"
        if self.key is not ... and found.key != (None if self.key is None else str(self.key)):
            yield f"key is {found.key!r}, expected {None if self.key is None else str(self.key)!r}"
        if self.payload is not ...:
            yield from _payload_mismatch(self.payload, found)
        for name, value in {} if self.headers is ... else self.headers.items():
            if name not in found.headers or found.headers[name] != value:
                yield f"header {name!r} is {found.headers.get(name, 'missing')!r}, expected {value!r}"

    def failure(self, times: int, found: int, there: Sequence[Enqueued]) -> str:
        """Return what to tell when there are not as many as wanted: what was asked for, and what there is."""
        given = [("topic", self.topic), ("key", self.key), ("payload", self.payload), ("headers", self.headers)]
        asked = ", ".join(f"{name}={value!r}" for name, value in given if value is not ...)
        nearest = sorted(there, key=lambda each: (each.topic != self.topic, len(self.mismatches(each))))
        listed = [self._listed(each) for each in nearest[:_MOST_LISTED]]
        more = [f"  and {len(there) - _MOST_LISTED} more"] if len(there) > _MOST_LISTED else []
        head = f"expected {times} of ({asked}) in the outbox, found {found}; there is"
        return "\n".join(
            [f"{head}:", *listed, *more] if there else [f"{head} nothing: was it enqueued here, and not yet published?"]
        )

    def _listed(self, each: Enqueued) -> str:
        mismatches = "; ".join(self.mismatches(each)) or "as asked for"
        payload = each.payload.decode(errors="backslashreplace")
        shown = payload if len(payload) <= _LONGEST else f"{payload[:_LONGEST]}..."
        return f"  {each.topic} key={each.key!r} {each.state} headers={dict(each.headers)} {shown}\n    {mismatches}"


def _payload_mismatch(wanted: object, found: Enqueued) -> Iterator[str]:
    if isinstance(wanted, bytes):
        if found.payload != wanted:
            yield f"payload is {found.payload!r:.300}, expected {wanted!r:.300}"
        return
    try:
        is_there = found.json()
    except ValueError:
        yield "payload is not JSON"
        return
    if is_there != _as_enqueued(wanted):
        yield f"payload is {is_there!r:.300}, expected {_as_enqueued(wanted)!r:.300}"


def _as_enqueued(wanted: object) -> Any:
    import json

    try:
        return json.loads(Event(topic="any", payload=wanted).body)
    except InvalidEvent:  # it holds something like unittest.mock.ANY
        return wanted
