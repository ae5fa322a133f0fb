"""The one database, of the parcels and the outbox alike."""

from __future__ import annotations

import os

from sqlalchemy import Identity, create_engine
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column, sessionmaker

engine = create_engine(os.environ["OUTBOX_DATABASE_URL"])
sessions = sessionmaker(engine)


class Base(DeclarativeBase):
    """The shop's own tables, apart from those of the outbox."""


class Parcel(Base):
    """What a customer ordered."""

    __tablename__ = "parcels"

    id: Mapped[int] = mapped_column(Identity(), primary_key=True)
    content: Mapped[str]


class Step(Base):
    """Something that was done for a parcel. No constraint keeps a second one out: that there is none is the tasks' doing."""

    __tablename__ = "steps"

    id: Mapped[int] = mapped_column(Identity(), primary_key=True)
    parcel_id: Mapped[int]
    what: Mapped[str]


if __name__ == "__main__":
    Base.metadata.create_all(engine)
