"""The outbox tables, version 1."""

from __future__ import annotations

from alembic import op

import outbox.migrations

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None


def upgrade() -> None:
    outbox.migrations.upgrade(op, version=1)


def downgrade() -> None:
    outbox.migrations.downgrade(op, version=1)
