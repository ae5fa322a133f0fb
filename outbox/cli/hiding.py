"""Hides passwords and other secrets in what is printed about the configuration."""

from __future__ import annotations

import re

HIDDEN = "***"
_NAMES = r"[\w.-]*(?:password|passwd|passphrase|pwd|secret|token|credentials?|signature|api_?key|access_?key)"
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
