"""What no database takes in a text, and error texts without it."""

from __future__ import annotations

import re

UNSTORABLE = re.compile("[\0\ud800-\udfff]")
"""NUL and halves of surrogate pairs."""

_LONGEST = 2000


def storable(text: str | None) -> str:
    """Return an error text without NUL and lone surrogates, not endless, not empty."""
    clean = (text or "unknown").replace("\x00", "\\x00").encode(errors="backslashreplace").decode()
    return clean[:_LONGEST]
