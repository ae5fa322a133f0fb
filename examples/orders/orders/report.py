"""How far the orders have come: `python -m orders.report`."""

from __future__ import annotations

from sqlalchemy import func, select

from orders.database import sessions
from orders.models import Order, Payment, Shipment


def main() -> None:
    with sessions() as session:
        for what in (Order, Payment, Shipment):
            count = session.scalar(select(func.count()).select_from(what))
            print(f"{what.__tablename__:<10} {count}")


if __name__ == "__main__":
    main()
