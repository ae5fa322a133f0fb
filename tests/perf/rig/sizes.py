"""How large a benchmark is: full by default, tiny where environment variables say so."""

import os


def size(name: str, default: int) -> int:
    """Return what `OUTBOX_PERF_<name>` says, else the full size."""
    return int(os.environ.get(f"OUTBOX_PERF_{name}", default))
