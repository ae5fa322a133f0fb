"""The inbox: effects of a message happen once, however often the broker delivers it."""

from outbox.inbox.dedup import once
from outbox.inbox.inbox import Inbox, Result
from outbox.inbox.message import Message

__all__ = ["Inbox", "Message", "Result", "once"]
