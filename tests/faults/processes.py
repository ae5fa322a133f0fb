"""Our programs as real processes, that can be killed and started again."""

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Self

ROOT = Path(__file__).parent.parent.parent


class Program:
    """One program that runs, is killed, and runs again; its log goes to a file that all its lives share."""

    def __init__(
        self, name: str, command: Sequence[str], environment: Mapping[str, str], *, ready: str = "", python: str = sys.executable
    ) -> None:
        self.name = name
        self._ready = ready
        self._logged_before = 0
        self.kills = 0
        self._command = [python, *command]
        self._environment = {**os.environ, **environment, "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"}
        self._log = tempfile.NamedTemporaryFile()  # noqa: SIM115 - closed by close()
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def process(self) -> subprocess.Popen[bytes]:
        """The process of this life."""
        if self._process is None:
            raise RuntimeError(f"{self.name} was not started")
        return self._process

    @property
    def log(self) -> str:
        """Everything that the program has logged so far."""
        return Path(self._log.name).read_text(errors="replace")

    def start(self) -> Self:
        """Start it."""
        self._logged_before = len(self.log)
        with Path(self._log.name).open("ab") as log:
            self._process = subprocess.Popen(
                self._command, env=self._environment, cwd=ROOT, stdout=log, stderr=log, start_new_session=True
            )
        return self

    def wait_until_ready(self, *, timeout_s: float = 60) -> Self:
        """Wait until this life has said in its log that it is at work."""
        self.wait_for_log(self._ready, timeout_s=timeout_s)
        return self

    def wait_for_log(self, text: str, *, timeout_s: float = 60) -> None:
        """Wait until this life has logged a text."""
        deadline = time.monotonic() + timeout_s
        while text not in self.log[self._logged_before :]:
            if self.process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"{self.name} did not log {text!r}:\n{self.log}")
            time.sleep(0.02)

    def kill(self) -> None:
        """Kill it with SIGKILL, as a power cut would."""
        self.process.kill()
        self.process.wait()
        self.kills += 1

    def terminate(self, *, timeout_s: float = 60) -> int:
        """Ask it to stop, and return its exit code."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(timeout_s)

    def close(self) -> None:
        """End it if it still runs."""
        if self._process is not None and self._process.poll() is None:
            self._process.kill()
            self._process.wait()
        self._log.close()

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.close()


def relay(name: str, database_url: str, broker_url: str, *options: str, program: str = "outbox") -> Program:
    """Return a relay, not started; a short lease so that a killed one is missed for seconds only."""
    command = ("-m", program, "run", "--lease", "8s", "--confirm-timeout", "3s", "--poll-interval", "100ms", *options)
    return Program(name, command, {"OUTBOX_DATABASE_URL": database_url, "OUTBOX_BROKER_URL": broker_url}, ready="relay started")


def consumer(name: str, database_url: str, broker_url: str, *options: str, program: str = "outbox.cli.consume") -> Program:
    """Return the consumer of `tests.faults.shop`, not started."""
    command = ("-m", program, "tests.faults.consumer:inbox", "--workers", "4", *options)
    return Program(name, command, {"OUTBOX_DATABASE_URL": database_url, "OUTBOX_BROKER_URL": broker_url}, ready="consuming")
