"""Topic names and the patterns that select them, with the meaning RabbitMQ gives to `*` and `#`."""

from __future__ import annotations

import re
from functools import lru_cache

NAME = re.compile(r"[A-Za-z0-9_-]+(\.[A-Za-z0-9_-]+)*")
_PATTERN = re.compile(r"(\*|#|[A-Za-z0-9_-]+)(\.(\*|#|[A-Za-z0-9_-]+))*")


def is_topic(name: str) -> bool:
    """Tell whether `name` is dot-separated words of letters, digits, `_` and `-`, at most 255 characters."""
    return len(name) <= 255 and NAME.fullmatch(name) is not None


def is_pattern(pattern: str) -> bool:
    """Tell whether `pattern` is a topic in which words may be `*` (one word) or `#` (any number of words)."""
    return len(pattern) <= 255 and _PATTERN.fullmatch(pattern) is not None


def matches(pattern: str, topic: str) -> bool:
    """Tell whether `topic` is selected by `pattern`: `*` is exactly one word, `#` is none or more.

    The rules are those of AMQP 0-9-1 topic exchanges, so a pattern can be used as a binding key unchanged.
    """
    return _match(tuple(pattern.split(".")), tuple(topic.split(".")))


@lru_cache(maxsize=4096)
def _match(pattern: tuple[str, ...], words: tuple[str, ...]) -> bool:
    if not pattern:
        return not words
    head, rest = pattern[0], pattern[1:]
    if head == "#":
        return _match(rest, words) or (bool(words) and _match(pattern, words[1:]))
    return bool(words) and head in ("*", words[0]) and _match(rest, words[1:])
