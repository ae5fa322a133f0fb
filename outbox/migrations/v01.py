"""Version 1: the tables. Frozen: a change of the tables is a new version, never an edit here."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import sqlalchemy as sa
from sqlalchemy.schema import conv

from outbox.sqltypes import BigId, Headers, UtcDateTime, now

if TYPE_CHECKING:
    from alembic.operations import Operations

_PARTITIONS = 64
_STATES = "'scheduled', 'pending', 'blocked', 'sent', 'dead'"
_Index = tuple[str, list[str], str | None]
_MESSAGE_INDEXES: tuple[_Index, ...] = (
    ("outbox_message_pending_ix", ["partition", "id"], "state = 'pending'"),
    ("outbox_message_again_ix", ["again", "id"], "state = 'pending' AND again IS NOT NULL"),
    ("outbox_message_scheduled_ix", ["available_at"], "state = 'scheduled'"),
    ("outbox_message_held_ix", ["key", "id"], "holds"),
    ("outbox_message_dead_ix", ["id"], "state = 'dead'"),
    ("outbox_message_blocked_ix", ["topic", "id"], "state = 'blocked'"),
    ("outbox_message_sent_ix", ["sent_at"], "state = 'sent'"),
)
_PROCESSED_INDEXES: tuple[_Index, ...] = (
    ("processed_messages_processed_at_ix", ["processed_at"], None),
    ("processed_messages_processing_ix", ["consumer", "lease_until"], "state = 'processing'"),
)
_FAILED_INDEXES: tuple[_Index, ...] = (
    ("failed_messages_due_ix", ["consumer", "available_at"], "state = 'retry'"),
    ("failed_messages_key_ix", ["consumer", "key", "id"], "key IS NOT NULL"),
    ("failed_messages_dead_ix", ["consumer", "id"], "state = 'dead'"),
)


def upgrade(op: Operations, *, schema: str | None) -> None:
    """Create the tables, and the row of each partition."""
    _create_message(op, schema)
    _create_partition(op, schema)
    _create_relay(op, schema)
    _create_pause(op, schema)
    _create_processed(op, schema)
    _create_failed(op, schema)


def downgrade(op: Operations, *, schema: str | None) -> None:
    """Drop the tables with what is in them."""
    for table in (
        "failed_messages",
        "processed_messages",
        "outbox_pause",
        "outbox_relay",
        "outbox_partition",
        "outbox_message",
    ):
        op.drop_table(table, schema=schema)


# Names are wrapped in `conv`, because alembic applies the naming convention of `target_metadata` to all others.


def _create_message(op: Operations, schema: str | None) -> None:
    op.create_table(
        "outbox_message",
        sa.Column("id", BigId, sa.Identity(), nullable=False),
        sa.Column("message_id", sa.Uuid(), nullable=False),
        sa.Column("topic", sa.Text(), nullable=False),
        sa.Column("key", sa.Text()),
        sa.Column("partition", sa.SmallInteger(), nullable=False),
        sa.Column("type", sa.Text(), nullable=False),
        sa.Column("content_type", sa.Text(), nullable=False),
        sa.Column("payload", sa.LargeBinary(), nullable=False),
        sa.Column("headers", Headers, nullable=False, server_default=sa.text("'{}'")),
        sa.Column("state", sa.Text(), nullable=False, server_default=sa.text("'pending'")),
        sa.Column("available_at", UtcDateTime(), nullable=False, server_default=now()),
        sa.Column("created_at", UtcDateTime(), nullable=False, server_default=now()),
        sa.Column("attempts", sa.Integer(), nullable=False, server_default=sa.text("0")),
        sa.Column("last_error", sa.Text()),
        sa.Column("error_class", sa.Text()),
        sa.Column("failures", Headers, nullable=False, server_default=sa.text("'[]'")),
        sa.Column("holds", sa.Boolean(), nullable=False, server_default=sa.false()),
        sa.Column("again", sa.SmallInteger()),
        sa.Column("sent_at", UtcDateTime()),
        sa.Column("dead_at", UtcDateTime()),
        sa.Column("schema_version", sa.SmallInteger(), nullable=False, server_default=sa.text("1")),
        sa.PrimaryKeyConstraint("id", name=conv("outbox_message_pk")),
        sa.UniqueConstraint("message_id", name=conv("outbox_message_message_id_uq")),
        sa.CheckConstraint(f"state IN ({_STATES})", name=conv("outbox_message_state_ck")),
        sa.CheckConstraint(f"partition >= 0 AND partition < {_PARTITIONS}", name=conv("outbox_message_partition_ck")),
        sa.CheckConstraint("(state = 'sent') = (sent_at IS NOT NULL)", name=conv("outbox_message_sent_at_ck")),
        sa.CheckConstraint("(state = 'dead') = (dead_at IS NOT NULL)", name=conv("outbox_message_dead_at_ck")),
        sa.CheckConstraint(
            "NOT holds OR (key IS NOT NULL AND state IN ('scheduled', 'blocked', 'dead'))", name=conv("outbox_message_holds_ck")
        ),
        schema=schema,
        sqlite_autoincrement=True,
    )
    _create_indexes(op, "outbox_message", _MESSAGE_INDEXES, schema)


def _create_partition(op: Operations, schema: str | None) -> None:
    op.create_table(
        "outbox_partition",
        sa.Column("partition", sa.SmallInteger(), nullable=False, autoincrement=False),
        sa.Column("lease_owner", sa.Text()),
        sa.Column("lease_token", sa.BigInteger(), nullable=False, server_default=sa.text("0")),
        sa.Column("lease_until", UtcDateTime()),
        sa.Column("served_at", UtcDateTime()),
        sa.Column("published", sa.BigInteger(), nullable=False, server_default=sa.text("0")),
        sa.Column("failed", sa.BigInteger(), nullable=False, server_default=sa.text("0")),
        sa.PrimaryKeyConstraint("partition", name=conv("outbox_partition_pk")),
        sa.CheckConstraint("(lease_owner IS NULL) = (lease_until IS NULL)", name=conv("outbox_partition_lease_ck")),
        schema=schema,
    )
    table = sa.table("outbox_partition", sa.column("partition", sa.SmallInteger()), schema=schema)
    # Literals, not parameters: offline there is nobody to bind them.
    op.execute(sa.insert(table).values([{"partition": sa.literal_column(str(n))} for n in range(_PARTITIONS)]))


def _create_relay(op: Operations, schema: str | None) -> None:
    op.create_table(
        "outbox_relay",
        sa.Column("owner", sa.Text(), nullable=False),
        sa.Column("version", sa.Text(), nullable=False),
        sa.Column("broker", sa.Text(), nullable=False),
        sa.Column("started_at", UtcDateTime(), nullable=False, server_default=now()),
        sa.Column("seen_at", UtcDateTime(), nullable=False, server_default=now()),
        sa.PrimaryKeyConstraint("owner", name=conv("outbox_relay_pk")),
        schema=schema,
    )


def _create_pause(op: Operations, schema: str | None) -> None:
    op.create_table(
        "outbox_pause",
        sa.Column("topics", sa.Text(), nullable=False),
        sa.Column("paused_at", UtcDateTime(), nullable=False, server_default=now()),
        sa.Column("resumed_at", UtcDateTime()),
        sa.PrimaryKeyConstraint("topics", name=conv("outbox_pause_pk")),
        schema=schema,
    )


def _create_processed(op: Operations, schema: str | None) -> None:
    op.create_table(
        "processed_messages",
        sa.Column("consumer", sa.Text(), nullable=False),
        sa.Column("message_id", sa.Text(), nullable=False),
        sa.Column("processed_at", UtcDateTime(), nullable=False, server_default=now()),
        sa.Column("state", sa.Text(), nullable=False, server_default=sa.text("'done'")),
        sa.Column("token", sa.BigInteger(), nullable=False, server_default=sa.text("0")),
        sa.Column("lease_until", UtcDateTime()),
        sa.Column("result", Headers),
        sa.PrimaryKeyConstraint("consumer", "message_id", name=conv("processed_messages_pk")),
        sa.CheckConstraint("state IN ('processing', 'done')", name=conv("processed_messages_state_ck")),
        sa.CheckConstraint("(state = 'processing') = (lease_until IS NOT NULL)", name=conv("processed_messages_lease_ck")),
        schema=schema,
    )
    _create_indexes(op, "processed_messages", _PROCESSED_INDEXES, schema)


def _create_failed(op: Operations, schema: str | None) -> None:
    op.create_table(
        "failed_messages",
        sa.Column("id", BigId, sa.Identity(), nullable=False),
        sa.Column("consumer", sa.Text(), nullable=False),
        sa.Column("message_id", sa.Text(), nullable=False),
        sa.Column("topic", sa.Text(), nullable=False),
        sa.Column("key", sa.Text()),
        sa.Column("type", sa.Text()),
        sa.Column("content_type", sa.Text()),
        sa.Column("payload", sa.LargeBinary(), nullable=False),
        sa.Column("headers", Headers, nullable=False, server_default=sa.text("'{}'")),
        sa.Column("state", sa.Text(), nullable=False, server_default=sa.text("'retry'")),
        sa.Column("attempts", sa.Integer(), nullable=False, server_default=sa.text("0")),
        sa.Column("failures", Headers, nullable=False, server_default=sa.text("'[]'")),
        sa.Column("last_error", sa.Text()),
        sa.Column("error_class", sa.Text()),
        sa.Column("received_at", UtcDateTime(), nullable=False, server_default=now()),
        sa.Column("available_at", UtcDateTime(), nullable=False, server_default=now()),
        sa.Column("dead_at", UtcDateTime()),
        sa.PrimaryKeyConstraint("id", name=conv("failed_messages_pk")),
        sa.UniqueConstraint("consumer", "message_id", name=conv("failed_messages_message_uq")),
        sa.CheckConstraint("state IN ('retry', 'blocked', 'dead')", name=conv("failed_messages_state_ck")),
        sa.CheckConstraint("(state = 'dead') = (dead_at IS NOT NULL)", name=conv("failed_messages_dead_at_ck")),
        sa.CheckConstraint("state <> 'blocked' OR key IS NOT NULL", name=conv("failed_messages_blocked_ck")),
        schema=schema,
        sqlite_autoincrement=True,
    )
    _create_indexes(op, "failed_messages", _FAILED_INDEXES, schema)


def _create_indexes(op: Operations, table: str, indexes: tuple[_Index, ...], schema: str | None) -> None:
    for name, columns, predicate in indexes:
        text = None if predicate is None else sa.text(predicate)
        where: dict[str, Any] = {} if text is None else {"postgresql_where": text, "sqlite_where": text}
        op.create_index(conv(name), table, columns, schema=schema, **where)
