"""The consumer of the demo, run by `outbox-consume`: ships every order in the transaction of its inbox."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from sqlalchemy.orm import sessionmaker

from outbox.demo.folder import QUEUE, Folder
from outbox.demo.tables import Shipment, open_database
from outbox.inbox import Inbox

if TYPE_CHECKING:
    from sqlalchemy.orm import Session

    from outbox.inbox import Message

FOLDER_VARIABLE = "OUTBOX_DEMO_FOLDER"


def make_inbox(folder: Folder) -> Inbox:
    """Return the inbox that works on the demo in `folder`."""
    inbox = Inbox("shipping", sessions=sessionmaker(open_database(folder)), queue=QUEUE)

    @inbox.transactional("orders.placed")
    def ship(session: Session, message: Message) -> None:
        session.add(Shipment(order_id=message.json()["order"]))

    return inbox


def __getattr__(name: str) -> Inbox:
    """Make `inbox` when `outbox-consume` asks for it, for the folder that the environment names."""
    if name == "inbox":
        return make_inbox(Folder(Path(os.environ[FOLDER_VARIABLE])))
    raise AttributeError(name)
