"""The keys, in a file: a line each, `name key`. The first one encrypts, every one decrypts.

python -m clinic.keys k1 >> keys      makes one
"""

from __future__ import annotations

import base64
import os
import sys
from pathlib import Path

from cryptography.hazmat.primitives.ciphers.aead import AESGCM


def keys() -> dict[str, bytes]:
    """Return all keys by their names, as they are now: a file of this size is soon read, and so a new key needs no restart."""
    lines = Path(os.environ["CLINIC_KEYS"]).read_text(encoding="ascii").splitlines()
    return {name: base64.b64decode(key) for name, key in (line.split() for line in lines)}


if __name__ == "__main__":
    print(sys.argv[1], base64.b64encode(AESGCM.generate_key(256)).decode())
