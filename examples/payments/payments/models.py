"""What is known about payments here; the money itself is the provider's."""

from __future__ import annotations

from decimal import Decimal
from uuid import UUID

from sqlalchemy import Numeric
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column


class Base(DeclarativeBase):
    """The payments' own tables, apart from those of the outbox."""


class Payment(Base):
    """The payment for an order: wanted, and, once there is a charge, made."""

    __tablename__ = "payments"

    order_id: Mapped[UUID] = mapped_column(primary_key=True)
    amount: Mapped[Decimal] = mapped_column(Numeric(12, 2))
    charge_id: Mapped[str | None]
