"""Takes out of a text what must not stand in a log: passwords, and what was to be written into the database."""

from __future__ import annotations

import re

HIDDEN = "***"

SECRETS = "password|passwd|passphrase|pwd|secret|api_?key|access_?key"
"""How the names of secrets end, wherever they stand, as a part of a regular expression."""

_TELLTALE = rf"[\w-]*(?:{SECRETS})"
_RULES = (
    # In a URL, also with an @ in a password that should have been %40.
    (re.compile(r"(\b[a-zA-Z][\w+.-]*://[^\s:/@'\"]*):[^\s'\"]*@"), rf"\1:{HIDDEN}@"),
    # As a parameter of a URL or in libpq's own form; quoted there, it may have spaces.
    (re.compile(rf"\b({_TELLTALE})(\s*=\s*)(?:'(?:[^'\\]|\\.)*'|[^\s&'\")]+)", re.IGNORECASE), rf"\1\2{HIDDEN}"),
    # In a dict or JSON that somebody has printed.
    (
        re.compile(rf"(['\"]{_TELLTALE}['\"]\s*:\s*)(?:'(?:[^'\\]|\\.)*'|\"(?:[^\"\\]|\\.)*\")", re.IGNORECASE),
        rf"\1'{HIDDEN}'",
    ),
    # SQLAlchemy's errors have the statement's parameters, and with them payloads, on a line of their own.
    (re.compile(r"^\[parameters: .*\]$", re.MULTILINE), f"[parameters: {HIDDEN}]"),
    # PostgreSQL's have the row that a constraint refused.
    (re.compile(r"Failing row contains \(.*?\)\.?$", re.MULTILINE | re.DOTALL), f"Failing row contains ({HIDDEN})."),
)
_SECRET_NAME = re.compile(_TELLTALE, re.IGNORECASE)


def redact(text: str) -> str:
    """Return a text without passwords in URLs, settings and printed dicts, and without the parameters of statements.

    Not guaranteed: that a secret is found which nothing around it shows to be one.
    """
    for pattern, instead in _RULES:
        text = pattern.sub(instead, text)
    return text


def names_a_secret(name: str) -> bool:
    """Tell whether a key is called like something that is to be kept secret."""
    return _SECRET_NAME.fullmatch(name) is not None
