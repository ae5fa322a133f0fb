"""`python -m outbox`, with a listener to its telemetry that raises at every event."""

import importlib

from outbox.cli import main
from tests.faults.heckled import heckled

importlib.import_module("outbox.cli.run").logged = heckled  # type: ignore[attr-defined]  # by its name: the package has a command of that name

if __name__ == "__main__":
    main(prog_name="outbox")
