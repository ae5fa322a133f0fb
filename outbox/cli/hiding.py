"""Hides passwords and other secrets in what is printed about the configuration."""

from __future__ import annotations

import re

from outbox.cli.redaction import HIDDEN, SECRETS

# Also what in a log is the name of something else, such as a lease's token.
_NAMES = rf"[\w.-]*(?:{SECRETS}|token|credentials?|signature)"
_NAME = re.compile(rf"(?i){_NAMES}")
_IN_A_QUERY = re.compile(rf"(?i)\b({_NAMES}\s*=)[^&;\s]*")
_OF_A_USER = re.compile(r"(://[^/?#@:]*:).*@")
_SEVERAL = re.compile(r";(?=[A-Za-z][\w+.-]*://)")


def hidden(name: str, value: str) -> str:
    """Return the text of a value without secrets: all of it if the name of the option says that it is one."""
    if _NAME.fullmatch(name):
        return HIDDEN
    return ";".join(_in_a_url(each) for each in _SEVERAL.split(value))


def _in_a_url(text: str) -> str:
    return _IN_A_QUERY.sub(rf"\1{HIDDEN}", _OF_A_USER.sub(rf"\1{HIDDEN}@", text))
