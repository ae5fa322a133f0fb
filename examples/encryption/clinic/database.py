"""The one database, of the clinic and the outbox alike."""

from __future__ import annotations

import os

from sqlalchemy import create_engine
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column, sessionmaker

engine = create_engine(os.environ["OUTBOX_DATABASE_URL"])
sessions = sessionmaker(engine)


class Base(DeclarativeBase):
    """The clinic's own tables, apart from those of the outbox."""


class Filed(Base):
    """What the ward has read of a finding."""

    __tablename__ = "filed"

    sample: Mapped[str] = mapped_column(primary_key=True)
    read_with: Mapped[str]
    length: Mapped[int]


if __name__ == "__main__":
    Base.metadata.create_all(engine)
