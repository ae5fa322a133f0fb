"""How much a benchmark does: from the environment, so that a tiny size shows in seconds whether it works."""

import os


def size(name: str, usual: int) -> int:
    """Return what OUTBOX_PERF_<name> says, else the usual size."""
    return int(os.environ.get(f"OUTBOX_PERF_{name}", usual))
