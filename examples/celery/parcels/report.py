"""How far the parcels have come: `python -m parcels.report`."""

from __future__ import annotations

from sqlalchemy import func, select

from parcels.database import Parcel, Step, sessions
from parcels.provider import Charge


def main() -> None:
    with sessions() as session:
        print(f"parcels  {session.scalar(select(func.count()).select_from(Parcel))}")
        print(f"charges  {session.scalar(select(func.count()).select_from(Charge))}")
        for what, count in session.execute(select(Step.what, func.count()).group_by(Step.what).order_by(Step.what)):
            print(f"{what}  {count}")


if __name__ == "__main__":
    main()
