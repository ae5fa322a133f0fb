"""`redeliver`: delivers one message in every way a broker may, and fails when a second delivery has an effect."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import sqlalchemy as sa

from outbox.errors import ConfigurationError
from outbox.inbox.inbox import Result
from outbox.testing.calls import Answer, CallRules
from outbox.testing.delivery import NotHandled, delivering, name_of
from outbox.testing.judge import Judge
from outbox.testing.scenarios import Scenario, Story

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from outbox.inbox import Inbox, Message
    from outbox.points import Point
    from outbox.testing.calls import Call
    from outbox.testing.delivery import Delivery, Outcome
    from outbox.testing.recording import Respond
    from outbox.testing.scenarios import Run


@dataclass(frozen=True, slots=True)
class Redelivered:
    """What was tried: the title of each scenario that ran, the calls of one plain delivery, and the columns not compared."""

    ran: tuple[str, ...]
    calls: tuple[Call, ...]
    not_compared: tuple[str, ...]


def redeliver(
    inbox: Inbox,
    message: Message,
    *,
    metadata: sa.MetaData | Sequence[sa.MetaData],
    scenarios: Iterable[Scenario] = tuple(Scenario),
    before: Sequence[Message] = (),
    after: Sequence[Message] = (),
    ignore: Iterable[str] = (),
    reset: Callable[[], object] | None = None,
    respond: Respond | None = lambda _call: Answer(),
    key_header: str = "Idempotency-Key",
    repeatable: Callable[[Call], bool] = lambda _call: False,
) -> Redelivered:
    """Deliver `message` to its handler in every way a broker may, each from the same state, and compare what came of it.

    The expected state is that after one plain delivery. `metadata` holds the tables that the handler may write; they, the
    enqueued events and the outgoing HTTP calls are compared. Each scenario starts from the rows that the tables have at the call,
    which are put back before and after it: commit what the test has made before, and call it on a test database
    only. `reset` replaces the putting back, where foreign keys, triggers or generated columns make it impossible.
    `before` and `after` are messages of the same key that come before and after this one; with them it is also delivered late
    and in other orders.

    Compared are the rows of a table as a set, without what two plain deliveries fill in differently (new ids, times,
    random values), generated primary keys and what refers to them, times of the last moments, and the columns in `ignore`
    ("column" or "table.column"). A value that the column had at the start is compared nevertheless.

    HTTP calls through `http.client` (urllib, requests) and httpx do not leave the process: `respond` answers them with a
    status and a body, or lets them out if it is None. One that is repeated with the same value in `key_header`, that only
    reads, or that `repeatable` selects, is no second effect.

    Raises `AssertionError` that lists what differs; also when one plain delivery fails, has no effect that can be seen,
    or does not lead to the same result each time, and when the handler forks. Raises `ConfigurationError` when the starting
    state cannot be put back or no scenario applies. Guaranteed: each scenario starts from the same rows, and afterwards they are as
    at the call. Not guaranteed, because not seen: effects elsewhere (e-mail, other databases, files, aiohttp). Sequences go on. In
    SQLite, and in a session that is rolled back, two deliveries at the same time run one after the other.
    """
    metadatas = [metadata] if isinstance(metadata, sa.MetaData) else list(metadata)
    with delivering(inbox, metadatas, respond=respond) as delivery:
        judge = Judge(inbox, delivery.database, calls=CallRules(key_header=key_header, repeatable=repeatable), ignore=ignore)
        test = _Test(delivery, judge, name_of(inbox, message), reset)
        try:
            passed = test.plain(before, message, after)
            story = Story(before, message, after, inbox.handling_of(message).mode, passed)
            ran = test.all([run for scenario in scenarios for run in story.runs(scenario)])
        finally:
            test.restart()
    return Redelivered(ran, tuple(test.expected.calls), judge.not_compared)


class _Test:
    def __init__(self, delivery: Delivery, judge: Judge, name: str, reset: Callable[[], object] | None) -> None:
        self._delivery = delivery
        self._judge = judge
        self._name = name
        self._reset = reset
        self._start = delivery.outcome().contents
        if reset is None:  # before the first delivery: afterwards it would be too late to find that it cannot be undone
            delivery.call(delivery.database.rewrite, self._start)
        self.expected: Outcome

    def restart(self) -> None:
        self._delivery.start_from(self._start, self._reset)

    def plain(self, before: Sequence[Message], message: Message, after: Sequence[Message]) -> list[Point]:
        """Find out what one delivery does, and do it again to see what of it is never the same; return the points it passes."""
        self.expected, passed = self._plainly(before, message, after)
        if not self._judge.sees(self._start, self.expected):
            raise AssertionError(
                f"{self._name} has no effect that can be seen: no table of metadata= changes, no event is enqueued, no call is made"
            )
        again, _ = self._plainly(before, message, after)
        if problems := self._judge.learn(self._start, self.expected, again):
            told = _told(["two plain deliveries from the same state do not lead to the same result", *problems])
            raise AssertionError(f"{self._name} cannot be judged:\n{told}")
        return passed

    def _plainly(self, before: Sequence[Message], message: Message, after: Sequence[Message]) -> tuple[Outcome, list[Point]]:
        self.restart()
        try:
            self._delivery.all_of(before)
            self._delivery.hooks.clear()
            result = self._delivery.once(message)
            passed = list(dict.fromkeys(self._delivery.hooks.passed))
            self._delivery.all_of(after)
        except (Exception, SystemExit) as error:
            raise AssertionError(self._failed(error)) from error
        if result is Result.DUPLICATE:
            raise AssertionError(f"{self._name} did not run: message {message.message_id} is recorded as handled already")
        return self._delivery.outcome(), passed

    def _failed(self, error: BaseException) -> str:
        cause = error.__cause__ or error
        left = self._judge.difference(self._start, self._start, self._delivery.outcome().contents)
        lines = [f"one plain delivery failed with {type(cause).__name__}: {cause}"]
        if left:
            lines += ["and yet it left something behind, although nothing of a delivery that fails may stay:", *left]
        return f"{self._name} cannot be judged:\n{_told(lines)}"

    def all(self, runs: Sequence[Run]) -> tuple[str, ...]:
        """Run all, and raise `AssertionError` with what is wrong in each."""
        if not runs:
            raise ConfigurationError("none of the scenarios applies; LATE and OUT_OF_ORDER need before= or after=")
        wrong = [text for run in runs for text in self._wrong(run)]
        if wrong:
            raise AssertionError("\n".join([f"{self._name} has another effect when its message comes again", *wrong]))
        return tuple(run.title for run in runs)

    def _wrong(self, run: Run) -> Iterator[str]:
        self.restart()
        try:
            run.deliver(self._delivery)
        except NotHandled as error:
            cause = error.__cause__
            yield f"{run.title}:\n  it failed each time, in the end with {type(cause).__name__}: {cause}"
            return
        if problems := self._judge.problems(self._start, self.expected, self._delivery.outcome()):
            yield f"{run.title}:\n{_told(problems)}"


def _told(lines: Sequence[str]) -> str:
    return "\n".join(f"  {line}" for line in lines)
