"""What came of it, here and at the provider: `python -m payments.report`."""

from __future__ import annotations

import json
import urllib.request

from sqlalchemy import func, select

from payments.database import sessions
from payments.models import Payment
from payments.provider import TIMEOUT_S, URL


def main() -> None:
    with sessions() as session:
        wanted, paid = session.execute(select(func.count(), func.count(Payment.charge_id)).select_from(Payment)).one()
    with urllib.request.urlopen(f"{URL}/charges", timeout=TIMEOUT_S) as response:  # noqa: S310 - ours
        charges = json.load(response)
    print(f"wanted   {wanted}\npaid     {paid}\ncharged  {len(charges)}")


if __name__ == "__main__":
    main()
