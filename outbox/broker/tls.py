"""TLS to a broker: certificate and host name are verified unless the URL says otherwise, and what fails is named.

The names are those of redis-py and Celery, for every broker: `?ssl_ca_certs=FILE`, `ssl_certfile=FILE`, `ssl_keyfile=FILE`,
`ssl_check_hostname=false`, `ssl_cert_reqs=none`. Left to themselves, kombu's `amqps://` looks at no host name, and its
`rediss://` at no certificate (kombu 5.7, amqp 5.4).
"""

from __future__ import annotations

import ssl
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from outbox import urls
from outbox.errors import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Iterator

_PLAIN = {"amqp": "amqps", "pyamqp": "amqps", "redis": "rediss", "rq+redis": "rq+rediss"}
_ENCRYPTED = ("amqps", "rediss", "rq+rediss")
_FILES = ("ssl_ca_certs", "ssl_certfile", "ssl_keyfile")
_OPTIONS = frozenset({*_FILES, "ssl_check_hostname", "ssl_cert_reqs", "ssl"})
_ANOTHER_HOST = (62, 64)  # OpenSSL's X509_V_ERR_HOSTNAME_MISMATCH and X509_V_ERR_IP_ADDRESS_MISMATCH
_UNKNOWN_ISSUER = (18, 19, 20, 21)


def with_files(url: str, *, ca: str | None = None, cert: str | None = None, key: str | None = None) -> str:
    """Return a broker URL, or several, that also say whom to trust and which certificate to show (PEM files).

    Raises `ConfigurationError` for a broker to which there is no TLS that these could be for.
    """
    files = {name: path for name, path in zip(_FILES, (ca, cert, key), strict=True) if path is not None}
    if files:
        for each in urls.all_current(url):
            if (scheme := each.partition("://")[0]) not in _ENCRYPTED:
                raise ConfigurationError(f"broker-ca, broker-cert and broker-key are for {_some_of(scheme)}, not for {scheme}://")
    return urls.adding(url, files)


def taken_from(url: str) -> tuple[str, dict[str, str]]:
    """Return a URL without its options of TLS, and what they say.

    Raises `ConfigurationError` for options, or files, that cannot work: none must be left out in silence. Other URLs than those
    of RabbitMQ and Redis are left alone.
    """
    scheme = url.partition("://")[0]
    if scheme not in _ENCRYPTED and scheme not in _PLAIN:
        return url, {}
    rest, options = urls.without_query(url, _OPTIONS)
    if options and (scheme in _PLAIN or "ssl" in options):
        named = ", ".join(sorted(options))
        raise ConfigurationError(f"the broker URL is one of {scheme}:// and has {named}; for TLS write {_some_of(scheme)}")
    _check(options)
    return rest, options


def _some_of(scheme: str) -> str:
    return f"{_PLAIN[scheme]}://" if scheme in _PLAIN else ", ".join(f"{each}://" for each in _ENCRYPTED)


def for_amqp(url: str, options: dict[str, str]) -> dict[str, Any]:
    """Return what py-amqp is to be told. The host is said here, since kombu makes an address of `localhost`."""
    known = {"ca_certs": "ssl_ca_certs", "certfile": "ssl_certfile", "keyfile": "ssl_keyfile"}
    told: dict[str, Any] = {name: options[ours] for name, ours in known.items() if ours in options}
    told["cert_reqs"] = ssl.CERT_REQUIRED if _is_verified(options) else ssl.CERT_NONE
    if _is_named(options):
        told["server_hostname"] = urlsplit(url).hostname or "localhost"
    return told


def for_redis(options: dict[str, str]) -> dict[str, Any]:
    """Return what redis-py is to be told."""
    files = {name: options[name] for name in _FILES if name in options}
    verified = "required" if _is_verified(options) else "none"
    return {"ssl_cert_reqs": verified, "ssl_check_hostname": _is_named(options), **files}


def refusal(error: BaseException) -> str | None:
    """Return what is wrong with a certificate, ours or the broker's, if that is what an error says."""
    for each in _chain(error):
        if isinstance(each, ssl.SSLCertVerificationError):
            return f"its certificate is not accepted: {each.verify_message.rstrip('.')}{_advice(each.verify_code)}"
        if isinstance(each, ssl.SSLError) and each.reason == "WRONG_VERSION_NUMBER":
            return (
                "it does not speak TLS at this port; is it the right one (RabbitMQ's is 5671), or is amqp:// or redis:// meant?"
            )
        if isinstance(each, ssl.SSLError) and "ALERT" in (each.reason or ""):
            return f"it refuses our certificate, or that we show none ({_said(each)}); give it one with --broker-cert"
    return None


def ended(error: BaseException) -> str | None:
    """Return what may be behind a connection of TLS that the other side has ended: what it said may be lost with it."""
    if any(isinstance(each, ssl.SSLEOFError) for each in _chain(error)):
        return "it has ended the TLS connection; if it goes on so, it wants a certificate of ours, or another (--broker-cert)"
    return None


def _is_verified(options: dict[str, str]) -> bool:
    return options.get("ssl_cert_reqs") != "none"


def _is_named(options: dict[str, str]) -> bool:
    return _is_verified(options) and options.get("ssl_check_hostname") != "false"


def _advice(code: int) -> str:
    if code in _ANOTHER_HOST:
        return "; connect to it by a name that its certificate has"
    return "; name the authority that has signed it with --broker-ca" if code in _UNKNOWN_ISSUER else ""


def _said(error: ssl.SSLError) -> str:
    return (error.reason or "").rpartition("ALERT_")[2].replace("_", " ").lower()


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def _check(options: dict[str, str]) -> None:
    for name, allowed in (("ssl_cert_reqs", ("required", "none")), ("ssl_check_hostname", ("true", "false"))):
        if options.get(name, allowed[0]) not in allowed:
            raise ConfigurationError(f"the broker URL says {name}={options[name]}; write {' or '.join(allowed)}")
    ca, cert, key = (options.get(name) for name in _FILES)
    if key is not None and cert is None:
        raise ConfigurationError("a key for TLS is of no use without its certificate (--broker-cert)")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    try:
        if ca is not None:
            context.load_verify_locations(ca)
        if cert is not None:
            context.load_cert_chain(cert, key, password=_no_passphrase)
    except (OSError, ValueError) as error:
        files = ", ".join(path for path in (ca, cert, key) if path is not None)
        raise ConfigurationError(f"these files cannot be used for TLS to the broker: {files}: {_problem(error)}") from error


def _no_passphrase() -> str:
    raise ValueError("the key has a passphrase, and nobody here could type it")


def _problem(error: Exception) -> str:
    if isinstance(error, ssl.SSLError):
        return (error.reason or str(error)).replace("_", " ").lower()
    return getattr(error, "strerror", None) or str(error)
