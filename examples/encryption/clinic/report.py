"""What the ward has read: `python -m clinic.report`."""

from __future__ import annotations

from sqlalchemy import select

from clinic.database import Filed, sessions


def main() -> None:
    with sessions() as session:
        for filed in session.scalars(select(Filed).order_by(Filed.sample)):
            print(f"{filed.sample}  read with {filed.read_with}  {filed.length} characters")


if __name__ == "__main__":
    main()
