"""URLs whose text, or whose password, is in a file: read whenever a connection is made, so that a new password is picked up.

`file:///run/secrets/database-url` stands for the URL in that file. `password_file=/run/secrets/password` in any URL's query
stands for the password in that file. What the query of a `file:` URL says is added to the URL that it holds.
"""

from __future__ import annotations

from pathlib import Path
from urllib.parse import parse_qsl, quote, unquote, urlencode, urlsplit

from outbox.errors import ConfigurationError

_FILE = "file://"
_PASSWORD_FILE = "password_file"  # noqa: S105 - the name of an option
_BETWEEN = ";"  # kombu's, between the URLs of several brokers


def of_file(path: Path) -> str:
    """Return the URL that stands for the one in a file."""
    return path.absolute().as_uri()


def is_in_a_file(url: str) -> bool:
    """Tell whether anything of a URL is in a file, so that it may be another one next time."""
    return url.startswith(_FILE) or f"{_PASSWORD_FILE}=" in url


def current(url: str) -> str:
    """Return a URL with what is in files. Raises `ConfigurationError`, without a word of what they hold."""
    return _BETWEEN.join(all_current(url)) if is_in_a_file(url) else url


def all_current(url: str) -> list[str]:
    """Return the URLs of several brokers, which are separated by `;`, each with what is in files."""
    return [_with_password(each) for each in _read(url).split(_BETWEEN)]


def adding(url: str, query: dict[str, str]) -> str:
    """Return a URL, or each of several, with more in its query."""
    if not query:
        return url
    return _BETWEEN.join(f"{each}{'&' if '?' in each else '?'}{urlencode(query)}" for each in url.split(_BETWEEN))


def without_query(url: str, names: frozenset[str]) -> tuple[str, dict[str, str]]:
    """Return a URL without these parts of its query, and what they said."""
    before, _, text = url.partition("?")
    query = parse_qsl(text, keep_blank_values=True)
    rest = urlencode([(name, value) for name, value in query if name not in names])
    return f"{before}?{rest}" if rest else before, {name: value for name, value in query if name in names}


def content(path: str, what: str) -> str:
    """Return what a file holds, without the end of its line. Raises `ConfigurationError` if that is nothing, or cannot be read."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        problem = getattr(error, "strerror", None) or "not UTF-8 text"
        raise ConfigurationError(f"the file with {what} cannot be read: {path}: {problem}") from error
    text = text.rstrip("\r\n")
    if not text.strip():
        raise ConfigurationError(f"the file with {what} is empty: {path}")
    return text


def _read(url: str) -> str:
    if not url.startswith(_FILE):
        return url
    parts = urlsplit(url)
    return adding(content(unquote(parts.path), "the URL").strip(), dict(parse_qsl(parts.query)))


def _with_password(url: str) -> str:
    rest, found = without_query(url, frozenset({_PASSWORD_FILE}))
    if not found:
        return url
    scheme, _, behind = rest.partition("://")
    user, at, host = behind.partition("@")
    if not at or ":" in user.rstrip(":"):
        raise ConfigurationError("a URL with password_file= must have a user and no password: scheme://user@host/name")
    password = quote(content(found[_PASSWORD_FILE], "the password"), safe="")
    return f"{scheme}://{user.rstrip(':')}:{password}@{host}"
