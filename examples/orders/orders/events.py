"""What the shop tells the world. The events of one order have its id as their key, so they stay in order."""

from __future__ import annotations

from dataclasses import dataclass
from decimal import Decimal
from uuid import UUID

import outbox


@outbox.event(topic="orders.placed", key="order_id")
@dataclass(frozen=True)
class OrderPlaced:
    """An order is there, and waits for its payment."""

    order_id: UUID
    total: Decimal


@outbox.event(topic="payments.taken", key="order_id")
@dataclass(frozen=True)
class PaymentTaken:
    """An order is paid, and may leave the house."""

    order_id: UUID
