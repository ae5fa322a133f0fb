"""A systemd for the tests: a user manager of its own, in mount and cgroup namespaces of its own.

It looks whether /run/systemd/system exists before it starts, which is there only where systemd has booted the machine, so it
gets a /run/systemd that nobody else sees. That takes root.
"""

import os
import shutil
import signal
import subprocess
from pathlib import Path
from typing import ClassVar

from tests.servers.proc import PrivateServer

PROGRAM = Path("/lib/systemd/systemd")
START = "mount -t tmpfs tmpfs /run/systemd && mkdir /run/systemd/system && exec {program} --user --log-target=console"


def unavailable() -> str | None:
    """Return why there can be none here; None when there can."""
    if not PROGRAM.exists() or shutil.which("systemctl") is None:
        return "systemd is not installed"
    if os.geteuid() != 0 or not Path("/run/systemd").is_dir():
        return "only root can give systemd a /run of its own"
    allowed = subprocess.run(["unshare", "--mount", "--cgroup", "true"], capture_output=True, check=False)
    return None if allowed.returncode == 0 else "no namespaces can be made here"


class Systemd(PrivateServer):
    """A user manager that knows the units put into `units`, and nothing else."""

    name: ClassVar[str] = "systemd"
    kill_signal: ClassVar[signal.Signals] = signal.SIGTERM  # it ends what it has started, then itself
    _not_ready = (subprocess.CalledProcessError,)

    def __init__(self) -> None:
        super().__init__()
        self.units = self.folder / "units"
        self.units.mkdir()
        for target in ("basic", "default", "exit", "shutdown"):
            shutil.copy(f"/usr/lib/systemd/user/{target}.target", self.units)
        shutil.copy("/usr/lib/systemd/user/systemd-exit.service", self.units)
        self._environment = {
            **os.environ,
            "XDG_RUNTIME_DIR": str(self.folder),
            "SYSTEMD_UNIT_PATH": str(self.units),
            "HOME": str(self.folder),
        }

    def systemctl(self, *arguments: str) -> str:
        """Run systemctl, and return what it prints. Raises `CalledProcessError`."""
        command = ["systemctl", "--user", *arguments]
        done = subprocess.run(command, env=self._environment, capture_output=True, text=True, check=True, timeout=60)
        return done.stdout

    def shows(self, unit: str, *properties: str) -> tuple[str, ...]:
        """Return the values of some properties of a unit."""
        lines = self.systemctl("show", unit, *(f"--property={each}" for each in properties)).splitlines()
        found = dict(line.split("=", 1) for line in lines)
        return tuple(found[each] for each in properties)

    def stop(self) -> None:
        """Stop what it has started, and the manager."""
        self._end(signal.SIGTERM)

    def _launch(self) -> subprocess.Popen[bytes]:
        command = ["unshare", "--mount", "--cgroup", "sh", "-c", START.format(program=PROGRAM)]
        return self._spawn(command, env=self._environment)

    def _connect(self) -> None:
        self.systemctl("show", "basic.target")
