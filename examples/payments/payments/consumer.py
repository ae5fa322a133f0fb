"""Terminal 4: take the payments. `outbox-consume payments.consumer:inbox`."""

from __future__ import annotations

from typing import Any
from uuid import UUID

import outbox
from outbox.inbox import Lease
from payments import provider
from payments.database import sessions
from payments.events import PaymentTaken
from payments.models import Payment

inbox = outbox.Inbox("payments", sessions=sessions)


# A short lease, so that who tries this out need not wait long for a killed consumer's message. It is renewed while the
# handler is at work, so it need not be as long as that; but longer than any pause of the machine, the database or the network.
@inbox.leased("payments.wanted", lease_s=6, time_limit_s=60)
def take_payment(lease: Lease, message: outbox.Message) -> dict[str, Any]:
    """Charge at the provider, under a key that is the same at every delivery; no transaction is open meanwhile."""
    wanted = message.json()
    lease.progress()  # raises LeaseLost if somebody else is at it by now
    charge = provider.charge(wanted["amount"], idempotency_key=lease.idempotency_key)
    with sessions.begin() as session:
        payment = session.get_one(Payment, UUID(wanted["order_id"]))
        payment.charge_id = charge["id"]
        outbox.enqueue(session, PaymentTaken(order_id=payment.order_id, charge_id=charge["id"]))
        lease.complete(charge, session=session)  # last: whoever has lost the lease writes nothing of all this
    return charge
