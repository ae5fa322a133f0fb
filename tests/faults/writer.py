"""One writing process: places orders, each in one transaction that commits or is rolled back."""

import random
import sys

import sqlalchemy as sa
from sqlalchemy.orm import Session

from tests.faults.shop import place

CUSTOMERS = 500


def write(url: str, *, name: str, orders: int, rollback: float, seed: int) -> None:
    """Place so many orders; about the share `rollback` of them is undone after the event was enqueued and flushed."""
    chance = random.Random(f"{seed}-{name}")
    engine = sa.create_engine(url)
    for number in range(orders):
        with Session(engine) as session:
            place(session, f"{name}-{number}", f"customer-{chance.randrange(CUSTOMERS)}")
            if chance.random() < rollback:
                session.flush()
                session.rollback()
            else:
                session.commit()
    engine.dispose()


if __name__ == "__main__":
    url, name, orders, rollback, seed = sys.argv[1:]
    write(url, name=name, orders=int(orders), rollback=float(rollback), seed=int(seed))
