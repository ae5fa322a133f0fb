"""Certificates for servers with TLS: an authority that nobody knows but the test, and what it has signed."""

import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

from tests.servers.proc import find_program

_CONFIGURATION = """
[req]
distinguished_name = name
prompt = no
[name]
CN = {name}
[authority]
basicConstraints = critical, CA:TRUE
keyUsage = critical, keyCertSign
subjectKeyIdentifier = hash
[signed]
basicConstraints = critical, CA:FALSE
keyUsage = critical, digitalSignature
subjectKeyIdentifier = hash
authorityKeyIdentifier = keyid
subjectAltName = {hosts}
"""


@dataclass(frozen=True)
class Certificate:
    """A certificate, and its key: two PEM files."""

    cert: Path
    key: Path

    def given_to(self, owner: str | None, folder: Path) -> "Certificate":
        """Copy it for a server that insists on a key that it owns and nobody else can read."""
        copy = Certificate(folder / self.cert.name, folder / self.key.name)
        for source, target in ((self.cert, copy.cert), (self.key, copy.key)):
            shutil.copyfile(source, target)
            target.chmod(0o600)
            if owner is not None:
                shutil.chown(target, user=owner)
        return copy


class Authority:
    """Signs certificates with its own, in a folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        folder.mkdir(exist_ok=True)
        self._own = self._make("authority", "authority", "DNS:unused")

    @property
    def ca(self) -> Path:
        """The file that says whom to trust."""
        return self._own.cert

    def sign(self, name: str, *hosts: str) -> Certificate:
        """Make a certificate for a name that is good for these hosts (`DNS:localhost`, `IP:127.0.0.1`)."""
        signed_by: list[str | Path] = ["-CA", self._own.cert, "-CAkey", self._own.key]
        return self._make(name, "signed", ",".join(hosts or (f"DNS:{name}",)), *signed_by)

    def _make(self, name: str, kind: str, hosts: str, *signed_by: str | Path) -> Certificate:
        made = Certificate(self._folder / f"{name}.pem", self._folder / f"{name}.key")
        configuration = self._folder / f"{name}.cnf"
        configuration.write_text(_CONFIGURATION.format(name=name, hosts=hosts))
        subprocess.run(
            [find_program("openssl"), "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes",
             "-days", "2", "-config", configuration, "-extensions", kind, "-keyout", made.key, "-out", made.cert, *signed_by],
            check=True, capture_output=True,
        )  # fmt: skip
        return made
