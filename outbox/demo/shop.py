"""The shop of the demo: an ordinary application, whose orders and outbox are in one database."""

from __future__ import annotations

import random
import threading
from typing import TYPE_CHECKING, Self

from sqlalchemy.orm import sessionmaker

import outbox
from outbox.demo.tables import Order, Refusal, open_database

if TYPE_CHECKING:
    from outbox.demo.folder import Folder

_CUSTOMERS = 300


class PaymentRefused(Exception):
    """The shop changes its mind after it has written the order and its event."""


class Shop:
    """Places orders one after the other in a thread of its own. A context manager: leaving it stops the shop."""

    def __init__(self, folder: Folder, *, orders: int, rollback: float) -> None:
        self._engine = open_database(folder)
        self._sessions = sessionmaker(self._engine)
        self._orders = orders
        self._rollback = rollback
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="demo-shop")
        self.error: Exception | None = None

    @property
    def open(self) -> bool:
        """Whether more orders will come."""
        return self._thread.is_alive()

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()
        self._engine.dispose()

    def _run(self) -> None:
        try:
            for number in range(1, self._orders + 1):
                if self._stop.is_set():
                    return
                self._place(number)
        except Exception as error:  # noqa: BLE001 - said by the thread that waits for us
            self.error = error

    def _place(self, number: int) -> None:
        customer = f"customer-{random.randrange(_CUSTOMERS)}"
        try:
            with self._sessions.begin() as session:
                session.add(Order(id=number, customer=customer))
                outbox.enqueue(session, outbox.Event(topic="orders.placed", payload={"order": number}, key=customer))
                session.flush()
                self._charge()
        except PaymentRefused:
            with self._sessions.begin() as session:
                session.add(Refusal(order_id=number))

    def _charge(self) -> None:
        if random.random() < self._rollback:
            raise PaymentRefused
