"""Terminal 1, the shop: `python -m parcels.order --count 5`."""

from __future__ import annotations

import argparse

from celery import chain
from sqlalchemy.orm import Session

from outbox.celery import unit_of_work
from parcels.database import Base, Parcel, engine, sessions
from parcels.tasks import charge, pack, send


def order(session: Session, content: str) -> None:
    """Add a parcel, and call what is to be done for it: all of it happens when the transaction commits, else nothing."""
    parcel = Parcel(content=content)
    session.add(parcel)
    session.flush()  # the database makes the id
    with unit_of_work(session):
        chain(pack.s(parcel.id), charge.s(), send.s()).delay()


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m parcels.order")
    parser.add_argument("--count", type=int, default=1, help="how many parcels to order")
    wanted = parser.parse_args()
    Base.metadata.create_all(engine)
    for number in range(wanted.count):
        with sessions.begin() as session:
            order(session, f"teapot {number}")
        print(f"ordered  teapot {number}")
    with sessions() as session:
        order(session, "a teapot that somebody thought better of")
        session.rollback()
    print("dropped  1")


if __name__ == "__main__":
    main()
