"""What workers do. `celery -A parcels.tasks worker`."""

from __future__ import annotations

import os
from typing import Any

from outbox.celery import LeasedTask, OutboxCelery, TransactionalTask
from parcels.database import Step, sessions
from parcels.provider import ask_for_money

app = OutboxCelery("parcels", broker=os.environ["OUTBOX_BROKER_URL"])
app.conf.worker_prefetch_multiplier = 1
app.conf.broker_connection_retry_on_startup = True


class ShopTask(TransactionalTask):
    """A task with its effects in the shop's database."""

    abstract = True
    sessions = sessions


class ProviderTask(LeasedTask):
    """A task with its effect at the payment provider."""

    abstract = True
    sessions = sessions


@app.task(base=ShopTask, bind=True)
def pack(self: Any, parcel_id: int) -> int:
    """Pack, and tell the customer: the second task is called if and only if the first one commits."""
    self.session.add(Step(parcel_id=parcel_id, what="packed"))
    tell.delay(parcel_id, "your parcel is packed")
    return parcel_id


@app.task(base=ProviderTask, bind=True)
def charge(self: Any, parcel_id: int) -> int:
    """Take the money. Should a worker die right after it asked, another one asks again under the same key."""
    ask_for_money(parcel_id, key=self.lease.idempotency_key)
    return parcel_id


@app.task(base=ShopTask, bind=True)
def send(self: Any, parcel_id: int) -> None:
    """Send the parcel."""
    self.session.add(Step(parcel_id=parcel_id, what="sent"))


@app.task(base=ShopTask, bind=True)
def tell(self: Any, parcel_id: int, text: str) -> None:
    """Write to the customer."""
    self.session.add(Step(parcel_id=parcel_id, what=f"told: {text}"))
