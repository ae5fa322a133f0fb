"""The text of the alembic revision that an application needs."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

IMPORTS = "import outbox.migrations"

_TEXT = '''\
"""{message}"""

from alembic import op

{imports}

revision = "{revision}"
down_revision = None  # put the id of your latest revision here, if there is one
branch_labels = None
depends_on = None


def upgrade() -> None:
    {upgrades}


def downgrade() -> None:
    {downgrades}
'''
_CALL = re.compile(r"migrations\.upgrade\(\s*op,\s*version\s*=\s*(\d+)")


def message_for(versions: Sequence[int]) -> str:
    """Return the message of a revision that takes these steps."""
    return f"outbox tables, version {versions[-1]}"


def text(versions: Sequence[int], *, schema: str | None = None) -> str:
    """Return a whole revision file that takes the steps `versions`, one call for each, to be pasted and adapted."""
    return _TEXT.format(
        message=message_for(versions),
        imports=IMPORTS,
        revision=f"outbox_{versions[-1]:04}",
        upgrades=calls("upgrade", versions, schema=schema),
        downgrades=calls("downgrade", versions, schema=schema),
    )


def calls(direction: Literal["upgrade", "downgrade"], versions: Sequence[int], *, schema: str | None = None) -> str:
    """Return the body of a revision's `upgrade`, or of its `downgrade`, which goes backwards; indented after line one."""
    ordered = versions if direction == "upgrade" else versions[::-1]
    target = "" if schema is None else f", schema={json.dumps(schema)}"
    return "\n    ".join(f"outbox.migrations.{direction}(op, version={version}{target})" for version in ordered)


def taken(sources: Iterable[str]) -> int:
    """Return the highest version whose step is called somewhere in the source of revisions, 0 when none is."""
    return max((int(version) for source in sources for version in _CALL.findall(source)), default=0)
