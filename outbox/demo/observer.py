"""A plain observer of a demo: sqlite3 on the two files, reading only, with nothing of the library in between."""

from __future__ import annotations

import sqlite3
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from outbox.demo.folder import Folder

# kombu never deletes a message: taking one makes it invisible, and putting one back adds another with this mark.
_VIEWS = """
CREATE TEMP VIEW published AS
  SELECT id, replace(json_extract(payload, '$.properties.message_id'), '-', '') AS message_id
  FROM broker.kombu_message WHERE json_extract(payload, '$.redelivered') IS NOT 1;
CREATE TEMP VIEW put_back AS
  SELECT id FROM broker.kombu_message WHERE json_extract(payload, '$.redelivered') IS 1;
"""


@contextmanager
def observing(folder: Folder) -> Iterator[sqlite3.Connection]:
    """Yield a connection to the shop's database with the broker's attached, and views of what was published."""
    connection = sqlite3.connect(_read_only(folder.shop), uri=True, timeout=30, isolation_level=None)
    try:
        connection.execute("ATTACH ? AS broker", (_read_only(folder.broker),))
        connection.executescript(_VIEWS)
        yield connection
    finally:
        connection.close()


def number(connection: sqlite3.Connection, query: str) -> int:
    """Return the one number that a query gives."""
    return int(connection.execute(query).fetchone()[0])


def _read_only(path: Path) -> str:
    return f"{path.absolute().as_uri()}?mode=ro"
