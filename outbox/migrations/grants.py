"""Who needs which rights on the tables: the least that lets each kind of process do its work, as data and as SQL.

Only PostgreSQL has rights of this kind. No sequence is granted: who may INSERT into a table may use its identity column.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from sqlalchemy.dialects import postgresql

from outbox.migrations import LATEST
from outbox.tables import MessageRow

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from typing import TypeAlias

    Columns: TypeAlias = tuple[str, ...]

WHOLE: Columns = ()
"""All columns, also those that a later version adds. What a row lock needs besides SELECT is UPDATE on any column."""

_OUTCOME = ("state", "available_at", "attempts", "last_error", "error_class", "failures", "holds", "again", "sent_at", "dead_at")
_TRIED = ("state", "available_at", "attempts", "last_error", "error_class", "failures", "dead_at")
_LEASE = ("lease_owner", "lease_token", "lease_until", "served_at", "published", "failed")


@dataclass(frozen=True, slots=True)
class Part:
    """One kind of process: what it does, and by table and privilege the columns that it needs."""

    does: str
    rights: Mapping[str, Mapping[str, Columns]]


APPLICATION = Part(
    "enqueues; can neither read nor change what it has enqueued",
    {"outbox_message": {"INSERT": tuple(MessageRow.__annotations__)}},
)
CONSUMER = Part(
    "handles messages; one that also enqueues, or has a dead_letter_topic, is an application too",
    {
        "processed_messages": {
            "SELECT": WHOLE,
            "INSERT": WHOLE,
            "UPDATE": ("processed_at", "state", "token", "lease_until", "result"),
            "DELETE": WHOLE,
        },
        "failed_messages": {"SELECT": WHOLE, "INSERT": WHOLE, "UPDATE": _TRIED, "DELETE": WHOLE},
    },
)
RELAY = Part(
    "publishes and cleans up; cannot change what a message says, nor enqueue one",
    {
        "outbox_message": {"SELECT": WHOLE, "UPDATE": _OUTCOME, "DELETE": WHOLE},
        "outbox_partition": {"SELECT": WHOLE, "UPDATE": _LEASE},
        "outbox_relay": {"SELECT": WHOLE, "INSERT": WHOLE, "UPDATE": ("version", "broker", "seen_at"), "DELETE": WHOLE},
        "outbox_pause": {"SELECT": WHOLE},
        # It changes nothing there: the right to is what it takes to lock the rows that it deletes.
        "processed_messages": {"SELECT": WHOLE, "UPDATE": ("lease_until",), "DELETE": WHOLE},
    },
)
OPERATOR = Part(
    "looks (status, doctor, messages), retries, discards, pauses; cannot change what a message says",
    {
        "outbox_message": {"SELECT": WHOLE, "UPDATE": _OUTCOME, "DELETE": WHOLE},
        # LOCK TABLE, with which a resume waits for the relays, does not make do with some columns.
        "outbox_partition": {"SELECT": WHOLE, "UPDATE": WHOLE},
        "outbox_relay": {"SELECT": WHOLE},
        "outbox_pause": {"SELECT": WHOLE, "INSERT": WHOLE, "UPDATE": ("paused_at", "resumed_at"), "DELETE": WHOLE},
        "processed_messages": {"SELECT": WHOLE},
        "failed_messages": {"SELECT": WHOLE},
    },
)

_quote = postgresql.dialect().identifier_preparer.quote  # type: ignore[no-untyped-call]


def statements(
    parts: Mapping[str, Sequence[Part]], *, schema: str | None = None, create_roles: bool = False, monitor: str | None = None
) -> str:
    """Return the SQL that gives to each role, by its name, the parts that it plays; it takes nothing away.

    Without `schema` the tables are looked up on the search path, and so that they can be found there is not granted. `monitor`
    is a role that may also see what other roles' sessions do, which only a superuser can grant.
    """
    lines = [f"-- The rights that each part of outbox needs on its tables, version {LATEST}. For their owner to run."]
    for role, played in parts.items():
        lines.append("")
        if create_roles:
            lines.append(f"CREATE ROLE {_quote(role)} NOLOGIN;")
        if schema is not None:
            lines.append(f"GRANT USAGE ON SCHEMA {_quote(schema)} TO {_quote(role)};")
        for part in played:
            lines += [f"-- It {part.does}.", *_grants(role, part, schema)]
        if role == monitor:
            lines.append(f"GRANT pg_monitor TO {_quote(role)};")
    return "\n".join(lines) + "\n"


def _grants(role: str, part: Part, schema: str | None) -> Iterator[str]:
    for table, rights in part.rights.items():
        privileges = ", ".join(_privilege(name, columns) for name, columns in rights.items())
        place = _quote(table) if schema is None else f"{_quote(schema)}.{_quote(table)}"
        yield f"GRANT {privileges} ON {place} TO {_quote(role)};"


def _privilege(name: str, columns: Columns) -> str:
    return f"{name} ({', '.join(map(_quote, columns))})" if columns else name
