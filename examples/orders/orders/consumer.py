"""Terminal 3: what follows from an order. `outbox-consume orders.consumer:inbox`."""

from __future__ import annotations

from decimal import Decimal
from uuid import UUID

from sqlalchemy.orm import Session

import outbox
from orders.database import sessions
from orders.events import PaymentTaken
from orders.models import Payment, Shipment

inbox = outbox.Inbox("fulfilment", sessions=sessions)


@inbox.transactional("orders.placed")
def take_payment(session: Session, message: outbox.Message) -> None:
    """Take the payment, and say so: consumed, changed and produced in one transaction."""
    placed = message.json()
    order_id = UUID(placed["order_id"])
    session.add(Payment(order_id=order_id, amount=Decimal(placed["total"])))
    outbox.enqueue(session, PaymentTaken(order_id=order_id))


@inbox.transactional("payments.taken")
def ship(session: Session, message: outbox.Message) -> None:
    """Ship what has been paid."""
    session.add(Shipment(order_id=UUID(message.json()["order_id"])))
