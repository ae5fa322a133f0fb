"""The tables, as SQLAlchemy sees them.

`Tables` can be put into any `MetaData` and schema; all names are given in full and pinned with `conv`,
so that an application's naming convention and default schema leave them alone.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import sqlalchemy as sa
from sqlalchemy.orm import registry
from sqlalchemy.schema import BLANK_SCHEMA, conv

from outbox.identity import PARTITIONS
from outbox.sqltypes import BigId, Headers, UtcDateTime, now
from outbox.states import State

if TYPE_CHECKING:
    from datetime import datetime
    from uuid import UUID

SCHEMA_VERSION = 1
"""The version of the tables that this release works with; every row carries the version that wrote it."""


class MessageRow:
    """One row of `outbox_message`, as `enqueue` adds it to a session. Not meant to be read or changed by applications."""

    message_id: UUID
    topic: str
    key: str | None
    partition: int
    type: str
    content_type: str
    payload: bytes
    headers: dict[str, Any]
    schema_version: int
    state: str
    available_at: datetime | sa.ColumnElement[datetime]

    def __init__(self, **values: Any) -> None:
        vars(self).update(values)  # past the session's record of changes, which nobody asks of a row that is only inserted


class Tables:
    """The tables in one `MetaData` and schema.

    `message` is the outbox itself, `partition` the relays' leases, `relay` the relays that are at work, `pause` the topics
    that are paused, `processed` the inbox, `failed` what consumers try again or have given up. `row` is the mapped class
    behind `message`.
    """

    def __init__(self, metadata: sa.MetaData | None = None, *, schema: str | None = None) -> None:
        self.metadata = metadata if metadata is not None else sa.MetaData()
        self.schema = schema
        self.message = _message(self.metadata, schema or BLANK_SCHEMA)
        self.partition = _partition(self.metadata, schema or BLANK_SCHEMA)
        self.relay = _relay(self.metadata, schema or BLANK_SCHEMA)
        self.pause = _pause(self.metadata, schema or BLANK_SCHEMA)
        self.processed = _processed(self.metadata, schema or BLANK_SCHEMA)
        self.failed = _failed(self.metadata, schema or BLANK_SCHEMA)
        self.row: type[MessageRow] = type("OutboxMessage", (MessageRow,), {})
        # The session is to know rows by an id that is made here, and to map nothing that the database fills in: then an
        # INSERT has nothing to bring back, and many rows of one flush go out in one batch.
        registry(metadata=self.metadata).map_imperatively(
            self.row,
            self.message,
            primary_key=[self.message.c.message_id],
            include_properties=list(MessageRow.__annotations__),
            eager_defaults=False,
        )
        # A flush takes its INSERT from here. Inline, or for a single row it would bring back the id that the database gave it, and
        # an application need not be allowed to read anything.
        self.message.insert = sa.insert(self.message).inline  # type: ignore[method-assign]

    def __iter__(self) -> Any:
        return iter((self.message, self.partition, self.relay, self.pause, self.processed, self.failed))


def attach(metadata: sa.MetaData, *, schema: str | None = None) -> Tables:
    """Put the outbox tables into an application's own `MetaData`, and into `schema` when one is given.

    Returns what `enqueue(..., tables=)`, `Inbox(..., tables=)` take. The application's naming convention and the
    default schema of its `MetaData` do not apply to them. Raises `sqlalchemy.exc.InvalidRequestError` when done twice.
    """
    return Tables(metadata, schema=schema)


# A record of the inbox is `processing` while a lease on the message is held, and `done` for good.
_RECORD_STATES = "'processing', 'done'"
# A failed message is tried again when it is due, waits behind an earlier one of its key, or is given up.
_FAILED_STATES = "'retry', 'blocked', 'dead'"

# What holds back later messages of the same key: one that is backing off or dead, and those already waiting behind it.
# A message that the application delayed, or that died in a topic whose keys go on without it, holds back nothing.
HELD = "holds"


# What has become deliverable after it was not, behind the place that a relay's cursor may have reached: `again` holds its
# partition then. A column of its own, because two indexes in the same order would leave the planner a choice, and the wrong one
# walks past everything that is pending.
AGAIN = "again IS NOT NULL"


def _where(predicate: str) -> dict[str, Any]:
    return {"postgresql_where": sa.text(predicate), "sqlite_where": sa.text(predicate)}


def _message(metadata: sa.MetaData, schema: Any) -> sa.Table:
    states = ", ".join(f"'{state}'" for state in State)
    return sa.Table(
        "outbox_message",
        metadata,
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
        sa.CheckConstraint(f"state IN ({states})", name=conv("outbox_message_state_ck")),
        sa.CheckConstraint(f"partition >= 0 AND partition < {PARTITIONS}", name=conv("outbox_message_partition_ck")),
        sa.CheckConstraint("(state = 'sent') = (sent_at IS NOT NULL)", name=conv("outbox_message_sent_at_ck")),
        sa.CheckConstraint("(state = 'dead') = (dead_at IS NOT NULL)", name=conv("outbox_message_dead_at_ck")),
        sa.CheckConstraint(
            "NOT holds OR (key IS NOT NULL AND state IN ('scheduled', 'blocked', 'dead'))", name=conv("outbox_message_holds_ck")
        ),
        sa.Index(conv("outbox_message_pending_ix"), "partition", "id", **_where("state = 'pending'")),
        sa.Index(conv("outbox_message_again_ix"), "again", "id", **_where(f"state = 'pending' AND {AGAIN}")),
        sa.Index(conv("outbox_message_scheduled_ix"), "available_at", **_where("state = 'scheduled'")),
        sa.Index(conv("outbox_message_held_ix"), "key", "id", **_where(HELD)),
        sa.Index(conv("outbox_message_dead_ix"), "id", **_where("state = 'dead'")),
        sa.Index(conv("outbox_message_blocked_ix"), "topic", "id", **_where("state = 'blocked'")),
        sa.Index(conv("outbox_message_sent_ix"), "sent_at", **_where("state = 'sent'")),
        schema=schema,
        sqlite_autoincrement=True,  # an id is never used twice, also after the table was empty
    )


def _partition(metadata: sa.MetaData, schema: Any) -> sa.Table:
    return sa.Table(
        "outbox_partition",
        metadata,
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


def _relay(metadata: sa.MetaData, schema: Any) -> sa.Table:
    return sa.Table(
        "outbox_relay",
        metadata,
        sa.Column("owner", sa.Text(), nullable=False),
        sa.Column("version", sa.Text(), nullable=False),
        sa.Column("broker", sa.Text(), nullable=False),
        sa.Column("started_at", UtcDateTime(), nullable=False, server_default=now()),
        sa.Column("seen_at", UtcDateTime(), nullable=False, server_default=now()),
        sa.PrimaryKeyConstraint("owner", name=conv("outbox_relay_pk")),
        schema=schema,
    )


def _pause(metadata: sa.MetaData, schema: Any) -> sa.Table:
    return sa.Table(
        "outbox_pause",
        metadata,
        sa.Column("topics", sa.Text(), nullable=False),
        sa.Column("paused_at", UtcDateTime(), nullable=False, server_default=now()),
        sa.Column("resumed_at", UtcDateTime()),
        sa.PrimaryKeyConstraint("topics", name=conv("outbox_pause_pk")),
        schema=schema,
    )


def _processed(metadata: sa.MetaData, schema: Any) -> sa.Table:
    return sa.Table(
        "processed_messages",
        metadata,
        sa.Column("consumer", sa.Text(), nullable=False),
        sa.Column("message_id", sa.Text(), nullable=False),
        sa.Column("processed_at", UtcDateTime(), nullable=False, server_default=now()),
        sa.Column("state", sa.Text(), nullable=False, server_default=sa.text("'done'")),
        sa.Column("token", sa.BigInteger(), nullable=False, server_default=sa.text("0")),
        sa.Column("lease_until", UtcDateTime()),
        sa.Column("result", Headers),
        sa.PrimaryKeyConstraint("consumer", "message_id", name=conv("processed_messages_pk")),
        sa.CheckConstraint(f"state IN ({_RECORD_STATES})", name=conv("processed_messages_state_ck")),
        sa.CheckConstraint("(state = 'processing') = (lease_until IS NOT NULL)", name=conv("processed_messages_lease_ck")),
        sa.Index(conv("processed_messages_processed_at_ix"), "processed_at"),
        sa.Index(conv("processed_messages_processing_ix"), "consumer", "lease_until", **_where("state = 'processing'")),
        schema=schema,
    )


def _failed(metadata: sa.MetaData, schema: Any) -> sa.Table:
    return sa.Table(
        "failed_messages",
        metadata,
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
        sa.CheckConstraint(f"state IN ({_FAILED_STATES})", name=conv("failed_messages_state_ck")),
        sa.CheckConstraint("(state = 'dead') = (dead_at IS NOT NULL)", name=conv("failed_messages_dead_at_ck")),
        sa.CheckConstraint("state <> 'blocked' OR key IS NOT NULL", name=conv("failed_messages_blocked_ck")),
        sa.Index(conv("failed_messages_due_ix"), "consumer", "available_at", **_where("state = 'retry'")),
        sa.Index(conv("failed_messages_key_ix"), "consumer", "key", "id", **_where("key IS NOT NULL")),
        sa.Index(conv("failed_messages_dead_ix"), "consumer", "id", **_where("state = 'dead'")),
        schema=schema,
        sqlite_autoincrement=True,
    )


DEFAULT = Tables()
metadata = DEFAULT.metadata
