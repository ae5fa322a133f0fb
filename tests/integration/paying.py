"""`python -m tests.integration.paying`: a worker that handles one message under a lease, and says how it went."""

import os
import threading
from typing import Any

import sqlalchemy as sa
from sqlalchemy.orm import sessionmaker

from outbox import Inbox, Message
from outbox.inbox import Busy, Lease, LeaseLost
from tests.integration.provider import charge

MESSAGE = Message(message_id="m-1", topic="orders.placed", payload=b'{"amount": 2990}')
LEASE_S = 0.9


def pay(lease: Lease, message: Message) -> Any:
    return charge(os.environ["PROVIDER_URL"], lease.idempotency_key, message.json()["amount"])


def main() -> None:
    inbox = Inbox("payments", sessions=sessionmaker(sa.create_engine(os.environ["OUTBOX_DATABASE_URL"])))
    inbox.leased("orders.*", lease_s=LEASE_S)(pay)
    while True:
        try:
            print("said:", inbox.process(MESSAGE))
            return
        except Busy:
            threading.Event().wait(0.05)  # as a broker that delivers it again
        except LeaseLost:
            print("said: lease lost")
            return


if __name__ == "__main__":
    main()
