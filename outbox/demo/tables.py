"""The tables of the demo's shop, as an application declares its own, and how it opens its database."""

from __future__ import annotations

import sqlite3
from typing import TYPE_CHECKING, Any

import sqlalchemy as sa
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

if TYPE_CHECKING:
    from outbox.demo.folder import Folder


class Base(DeclarativeBase):
    """The shop's own tables."""


class Order(Base):
    """An order that was committed."""

    __tablename__ = "orders"
    id: Mapped[int] = mapped_column(primary_key=True)
    customer: Mapped[str]


class Refusal(Base):
    """The shop's note, made afterwards, of an order whose transaction was rolled back."""

    __tablename__ = "refusals"
    order_id: Mapped[int] = mapped_column(primary_key=True)


class Shipment(Base):
    """What the consumer does about an order. No constraint keeps an order from being shipped twice: it would show."""

    __tablename__ = "shipments"
    id: Mapped[int] = mapped_column(primary_key=True)
    order_id: Mapped[int]


def open_database(folder: Folder) -> sa.Engine:
    """Return an engine for the shop's database that waits for locks.

    It does not wait for the disk at every commit: a process that is killed loses nothing by that, only a power cut does.
    """
    engine = sa.create_engine(folder.shop_url, connect_args={"timeout": 30})

    @sa.event.listens_for(engine, "connect")
    def prepare(connection: sqlite3.Connection, _record: Any) -> None:
        connection.execute("PRAGMA synchronous = NORMAL")

    return engine
