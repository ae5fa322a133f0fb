"""One message on its way through a handler: what FastStream wraps around it."""

from __future__ import annotations

import asyncio
import logging
from contextlib import suppress
from typing import TYPE_CHECKING, Any, NoReturn

from faststream.exceptions import AckMessage, HandlerException
from faststream.message import SourceType
from faststream.middlewares import BaseMiddleware

from outbox.errors import ConfigurationError
from outbox.faststream.acks import Safety, advice
from outbox.faststream.received import from_aio_pika
from outbox.points import Point, reached
from outbox.tracing.processing import processing

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from faststream.context import ContextRepo
    from faststream.message import StreamMessage

    from outbox.faststream.middleware import InboxMiddleware
    from outbox.inbox.message import Message
    from outbox.tracing.processing import Delivery

    CallNext = Callable[[StreamMessage[Any]], Awaitable[Any]]

log = logging.getLogger("outbox.faststream")

SESSION = "outbox_session"
MESSAGE = "outbox_message"
"""The names under which FastStream's context has the session and the message."""


class OneMessage(BaseMiddleware[Any, Any]):
    """Handles one message in a transaction, and sees to it that it comes again if that was not committed."""

    def __init__(self, msg: Any, /, *, context: ContextRepo, inbox: InboxMiddleware) -> None:
        super().__init__(msg, context=context)
        self._inbox = inbox

    async def consume_scope(self, call_next: CallNext, msg: StreamMessage[Any]) -> Any:
        """Handle a message in a transaction; let pass what is no handler's: replies, and what `get_one` reads."""
        handled = getattr(self.context.get_local("message"), "raw_message", None)
        if msg.source_type is SourceType.RESPONSE or handled is not msg.raw_message:
            return await call_next(msg)
        subscriber = self.context.get_local("handler_")
        safety = self._inbox.safety_of(subscriber)
        try:
            if safety is Safety.REFUSED:
                self._refuse(subscriber)
            return await self._traced(call_next, msg)
        except (HandlerException, asyncio.CancelledError):
            raise
        except BaseException:
            await asyncio.sleep(self._inbox.pause_s)
            if safety is not Safety.SAFE:
                with suppress(Exception):  # no connection: then the broker delivers it again by itself
                    await msg.nack()
            raise

    def _refuse(self, subscriber: Any) -> NoReturn:
        raise ConfigurationError(advice(subscriber))

    async def _traced(self, call_next: CallNext, msg: StreamMessage[Any]) -> Any:
        message, inbox = from_aio_pika(msg.raw_message), self._inbox
        with processing(
            message.headers,
            topic=message.topic,
            message_id=message.message_id,
            consumer=inbox.consumer,
            continues=inbox.continue_traces,
            no_failures=(AckMessage,),
        ) as delivery:
            return await self._handle(call_next, msg, message, delivery)

    async def _handle(self, call_next: CallNext, msg: StreamMessage[Any], message: Message, delivery: Delivery) -> Any:
        result = said = None
        async with self._inbox.once(message) as (session, first):
            if first:
                with self.context.scopes(((SESSION, session), (MESSAGE, message))):
                    try:
                        result = await call_next(msg)
                    except AckMessage as error:
                        said = error
                if msg.committed is not None:
                    log.warning("handler acknowledged before the COMMIT", extra={"message_id": message.message_id})
        reached(Point.BEFORE_ACK)
        delivery.came_to("handled" if first else "duplicate")
        if not first:
            log.info("duplicate, dropped", extra={"consumer": self._inbox.consumer, "message_id": message.message_id})
            raise AckMessage  # to return would let FastStream publish an empty reply
        if said is not None:
            raise said
        return result
