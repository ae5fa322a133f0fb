"""The table of payments."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "payments",
        sa.Column("order_id", sa.Uuid(), primary_key=True),
        sa.Column("amount", sa.Numeric(12, 2), nullable=False),
        sa.Column("charge_id", sa.String(), nullable=True),
    )


def downgrade() -> None:
    op.drop_table("payments")
