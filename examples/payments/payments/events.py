"""What is told to the consumer, and by it."""

from __future__ import annotations

from dataclasses import dataclass
from decimal import Decimal
from uuid import UUID

import outbox


@outbox.event(topic="payments.wanted", key="order_id")
@dataclass(frozen=True)
class PaymentWanted:
    """An order waits for its payment."""

    order_id: UUID
    amount: Decimal


@outbox.event(topic="payments.taken", key="order_id")
@dataclass(frozen=True)
class PaymentTaken:
    """An order is paid."""

    order_id: UUID
    charge_id: str
