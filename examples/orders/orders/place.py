"""Terminal 1, the shop: `python -m orders.place --count 10`."""

from __future__ import annotations

import argparse
from uuid import uuid4

from sqlalchemy.orm import Session

import outbox
from orders.database import sessions
from orders.events import OrderPlaced
from orders.models import Item, Order


class OutOfStock(Exception):
    """There is less in stock than was ordered."""


def place(session: Session, item_name: str, quantity: int) -> Order:
    """Add an order and its event to the caller's transaction: when it commits both are there, else neither is."""
    item = session.get_one(Item, item_name, with_for_update=True)
    order = Order(id=uuid4(), item=item.name, quantity=quantity, total=quantity * item.price)
    session.add(order)
    outbox.enqueue(session, OrderPlaced(order_id=order.id, total=order.total))

    # Not too late: an exception undoes the order and takes the event back.
    if item.in_stock < quantity:
        raise OutOfStock(f"{quantity} x {item.name} ordered, {item.in_stock} in stock")
    item.in_stock -= quantity
    return order


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m orders.place")
    parser.add_argument("--count", type=int, default=1, help="how many orders to place")
    parser.add_argument("--item", default="teapot", help="what to order")
    parser.add_argument("--quantity", type=int, default=1, help="how many of it in each order")
    wanted = parser.parse_args()

    for _ in range(wanted.count):
        try:
            with sessions.begin() as session:
                order = place(session, wanted.item, wanted.quantity)
                line = f"placed   {order.id}  {order.quantity} x {order.item}, {order.total}"
            print(line)
        except OutOfStock as refusal:
            print(f"refused  {refusal}")


if __name__ == "__main__":
    main()
