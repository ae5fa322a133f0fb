"""Delivers a message to an inbox as a broker would, and shows what came of it."""

from __future__ import annotations

from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from outbox.testing.calling import calling
from outbox.testing.database import Database
from outbox.testing.forks import forks_refused
from outbox.testing.hooks import Killed, hooked
from outbox.testing.interception import intercepted
from outbox.testing.recording import Recorder

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    import sqlalchemy as sa

    from outbox.inbox import Inbox, Message, Result
    from outbox.testing.calling import CallIn
    from outbox.testing.calls import Call
    from outbox.testing.database import Contents
    from outbox.testing.forks import Forked
    from outbox.testing.hooks import Hooks
    from outbox.testing.recording import Respond

_TRIES = 3


class NotHandled(Exception):
    """A message was delivered several times and its handler failed each time; the cause is the last error."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What was there when all was over."""

    contents: Contents
    calls: Sequence[Call]


class Delivery:
    """One inbox, the messages of a test, and the world around its handler: database, HTTP, named points."""

    def __init__(
        self, inbox: Inbox, *, call: CallIn, database: Database, hooks: Hooks, http: Recorder, forks: list[Forked]
    ) -> None:
        self.inbox = inbox
        self.hooks = hooks
        self.call = call
        self.database = database
        self._http = http
        self._forks = forks

    def once(self, message: Message) -> Result:
        """Deliver a message; raises whatever its handler raises. For any thread."""
        result = self.call(self.inbox.process, message)
        if self._forks:  # it was swallowed
            raise self._forks.pop()
        return result

    def attempt(self, message: Message) -> BaseException | None:
        """Deliver a message and return the error, if there was one. For any thread."""
        try:
            self.once(message)
        except (Exception, Killed, SystemExit) as error:  # noqa: BLE001 - it is the scenario that judges it
            return error
        return None

    def again(self, message: Message) -> None:
        """Deliver a message once more, and again if that fails, as a broker does. Raises `NotHandled` in the end."""
        self.all_of([replace(message, redelivered=True)])

    def all_of(self, messages: Sequence[Message]) -> None:
        """Deliver messages in this order; those that fail come again after the others. Raises `NotHandled` in the end."""
        waiting = list(messages)
        for _ in range(_TRIES):
            failed = [(message, error) for message in waiting if (error := self.attempt(message)) is not None]
            if not failed:
                return
            waiting = [replace(message, redelivered=True) for message, _ in failed]
            self.pass_time()
        raise NotHandled from failed[0][1]

    def pass_time(self) -> None:
        """Let the time pass after which a lease of a dead worker is over."""
        self.call(self.database.expire_leases)

    def die(self) -> None:
        """Do what the end of a process does to its connections."""
        self.call(self.database.cut_connections)

    def outcome(self) -> Outcome:
        """Return what is in the database, and which calls were made since the last time."""
        return Outcome(self.call(self.database.read), self._http.take())

    def start_from(self, contents: Contents, reset: Callable[[], object] | None) -> None:
        """Bring everything back to the starting state."""
        self.hooks.clear()
        self._http.take()
        if reset is None:
            self.call(self.database.put_back, contents)
        else:
            reset()


@contextmanager
def delivering(inbox: Inbox, metadata: Sequence[sa.MetaData], *, respond: Respond | None) -> Iterator[Delivery]:
    """Put the world around an inbox in place for the block: nothing of it leaves the process."""
    http = Recorder(respond)
    with ExitStack() as stack:
        call = stack.enter_context(calling(is_async=inbox.is_async))
        database = Database(inbox, metadata)
        stack.callback(call, database.give_back)
        hooks = stack.enter_context(hooked())
        stack.enter_context(intercepted(http))
        forks = stack.enter_context(forks_refused())
        yield Delivery(inbox, call=call, database=database, hooks=hooks, http=http, forks=forks)


def name_of(inbox: Inbox, message: Message) -> str:
    """Return what a handler is called in an error."""
    handler: Any = inbox.handling_of(message).handler
    return f"handler {getattr(handler, '__qualname__', repr(handler))} of consumer {inbox.consumer!r}"
