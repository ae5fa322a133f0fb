"""The shop's tables, and what it sells."""

from __future__ import annotations

from decimal import Decimal

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None

MONEY = sa.Numeric(12, 2)


def upgrade() -> None:
    items = op.create_table(
        "items",
        sa.Column("name", sa.String(), primary_key=True),
        sa.Column("price", MONEY, nullable=False),
        sa.Column("in_stock", sa.Integer(), nullable=False),
    )
    op.create_table(
        "orders",
        sa.Column("id", sa.Uuid(), primary_key=True),
        sa.Column("item", sa.String(), sa.ForeignKey("items.name"), nullable=False),
        sa.Column("quantity", sa.Integer(), nullable=False),
        sa.Column("total", MONEY, nullable=False),
    )
    op.create_table(
        "payments",
        sa.Column("id", sa.Integer(), sa.Identity(), primary_key=True),
        sa.Column("order_id", sa.Uuid(), sa.ForeignKey("orders.id"), nullable=False),
        sa.Column("amount", MONEY, nullable=False),
    )
    op.create_table(
        "shipments",
        sa.Column("id", sa.Integer(), sa.Identity(), primary_key=True),
        sa.Column("order_id", sa.Uuid(), sa.ForeignKey("orders.id"), nullable=False),
    )
    op.bulk_insert(items, [{"name": "teapot", "price": Decimal("29.90"), "in_stock": 100_000}])


def downgrade() -> None:
    for table in ("shipments", "payments", "orders", "items"):
        op.drop_table(table)
