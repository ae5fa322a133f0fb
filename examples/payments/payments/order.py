"""Terminal 1: want some payments. `python -m payments.order --count 3`."""

from __future__ import annotations

import argparse
from decimal import Decimal
from uuid import uuid4

import outbox
from payments.database import sessions
from payments.events import PaymentWanted
from payments.models import Payment

AMOUNT = Decimal("29.90")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m payments.order")
    parser.add_argument("--count", type=int, default=1, help="how many payments to want")
    for _ in range(parser.parse_args().count):
        with sessions.begin() as session:
            order_id = uuid4()
            session.add(Payment(order_id=order_id, amount=AMOUNT))
            outbox.enqueue(session, PaymentWanted(order_id=order_id, amount=AMOUNT))
        print(f"wanted  {order_id}  {AMOUNT}")


if __name__ == "__main__":
    main()
