"""What the shop keeps in its database."""

from __future__ import annotations

from decimal import Decimal
from typing import Annotated
from uuid import UUID

from sqlalchemy import ForeignKey, Identity, Numeric
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

Money = Annotated[Decimal, mapped_column(Numeric(12, 2))]


class Base(DeclarativeBase):
    """The shop's own tables, apart from those of the outbox."""


class Item(Base):
    """Something that the shop sells."""

    __tablename__ = "items"

    name: Mapped[str] = mapped_column(primary_key=True)
    price: Mapped[Money]
    in_stock: Mapped[int]


class Order(Base):
    """What a customer wants. Its id is made by the shop, so that an event can name it before the INSERT."""

    __tablename__ = "orders"

    id: Mapped[UUID] = mapped_column(primary_key=True)
    item: Mapped[str] = mapped_column(ForeignKey("items.name"))
    quantity: Mapped[int]
    total: Mapped[Money]


class Payment(Base):
    """The money for an order. No constraint keeps a second one out: that there is none is the inbox's doing."""

    __tablename__ = "payments"

    id: Mapped[int] = mapped_column(Identity(), primary_key=True)
    order_id: Mapped[UUID] = mapped_column(ForeignKey("orders.id"))
    amount: Mapped[Money]


class Shipment(Base):
    """A parcel, once an order is paid. Again nothing but the inbox keeps a second one out."""

    __tablename__ = "shipments"

    id: Mapped[int] = mapped_column(Identity(), primary_key=True)
    order_id: Mapped[UUID] = mapped_column(ForeignKey("orders.id"))
