"""Error texts as every database takes them."""

from __future__ import annotations

_LONGEST = 2000


def storable(text: str | None) -> str:
    """Return an error text without NUL and lone surrogates, not endless, not empty."""
    clean = (text or "unknown").replace("\x00", "\\x00").encode(errors="backslashreplace").decode()
    return clean[:_LONGEST]
