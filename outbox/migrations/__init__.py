"""The versioned steps that make and change the outbox tables, called from an application's own alembic revisions.

A step, once released, never changes. Only alembic's `op` is needed, and it is passed in: alembic is not imported here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

from outbox.errors import ConfigurationError
from outbox.migrations import v01

if TYPE_CHECKING:
    from types import ModuleType
    from typing import TypeAlias

    from alembic.operations import Operations

    Op: TypeAlias = Operations | ModuleType
    """What `from alembic import op` gives is a module to a type checker."""


class _Step(Protocol):
    def upgrade(self, op: Any, *, schema: str | None) -> None: ...

    def downgrade(self, op: Any, *, schema: str | None) -> None: ...


_STEPS: dict[int, _Step] = {1: v01}

LATEST = max(_STEPS)
"""The newest version of the tables, the one that this release works with."""


def upgrade(op: Op, *, version: int, schema: str | None = None) -> None:
    """Take the tables from `version` - 1 to `version`: exactly this one step, in the caller's transaction.

    A team that begins with a release whose `LATEST` is 3 calls it three times, for 1, 2 and 3, in one revision;
    `outbox-relay schema revision` writes such a revision. Works online and offline (`alembic upgrade --sql`), on
    PostgreSQL and SQLite. `schema` names the database schema of the tables; it must exist. Names of tables, constraints
    and indexes do not follow the application's naming convention. Raises `ConfigurationError` for an unknown version.
    """
    _step(version).upgrade(op, schema=schema)


def downgrade(op: Op, *, version: int, schema: str | None = None) -> None:
    """Take the tables from `version` back to `version` - 1: exactly this one step.

    Undoing version 1 drops the tables **with what is in them**: messages not yet published are lost, and consumers
    forget what they have handled. Raises `ConfigurationError` for an unknown version.
    """
    _step(version).downgrade(op, schema=schema)


def _step(version: int) -> _Step:
    if version not in _STEPS:
        message = (
            f"there is no version {version!r} of the outbox tables; this release knows 1 to {LATEST}. "
            "A newer one needs a newer outbox-relay"
        )
        raise ConfigurationError(message)
    return _STEPS[version]
