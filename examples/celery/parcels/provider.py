"""Stands for a payment provider, which takes the money for one key once. Its books are a table, to be seen in the report."""

from __future__ import annotations

from sqlalchemy import select
from sqlalchemy.orm import Mapped, mapped_column

from parcels.database import Base, sessions


class Charge(Base):
    """The provider's own record."""

    __tablename__ = "charges"

    key: Mapped[str] = mapped_column(primary_key=True)
    parcel_id: Mapped[int]


def ask_for_money(parcel_id: int, *, key: str) -> None:
    """Charge, unless this key was charged before."""
    with sessions.begin() as books:
        if books.scalar(select(Charge).where(Charge.key == key)) is None:
            books.add(Charge(key=key, parcel_id=parcel_id))
