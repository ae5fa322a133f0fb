"""The inbox: effects of a message happen once, however often the broker delivers it."""

from outbox.backoff import Backoff
from outbox.inbox.dedup import once
from outbox.inbox.errors import (
    Busy,
    HandlersStuck,
    InvalidMessageId,
    InvalidResult,
    LeaseLost,
    NoHandler,
    Permanent,
    ProcessDied,
    TimeLimitExceeded,
    Unfinished,
    UnusableMessage,
)
from outbox.inbox.handlers import Handling, Mode, Rules
from outbox.inbox.inbox import Inbox, Result
from outbox.inbox.lease import AsyncLease, Lease
from outbox.inbox.leasing import leased
from outbox.inbox.message import Message
from outbox.states import OnDead, RetryPolicy

__all__ = [
    "AsyncLease",
    "Backoff",
    "Busy",
    "HandlersStuck",
    "Handling",
    "Inbox",
    "InvalidMessageId",
    "InvalidResult",
    "Lease",
    "LeaseLost",
    "Message",
    "Mode",
    "NoHandler",
    "OnDead",
    "Permanent",
    "ProcessDied",
    "Result",
    "RetryPolicy",
    "Rules",
    "TimeLimitExceeded",
    "Unfinished",
    "UnusableMessage",
    "leased",
    "once",
]
