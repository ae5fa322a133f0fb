"""The relay and the consumer of the demo: real processes, which end with the demo however it ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from typing import TYPE_CHECKING, Self

from outbox.demo.shipping import FOLDER_VARIABLE
from outbox.errors import OutboxError

if TYPE_CHECKING:
    from outbox.demo.folder import Folder

_STOP_S = 10.0
# With one message at a time in its hands, what is taken from the broker is handled.
_CONSUMER = ("-c", "from outbox.cli.consume import main; main()", "outbox.demo.shipping:inbox", "--prefetch", "1", "--broker-url")

# Reads the process ids to watch, a line whenever they change. Its input ends when the demo ends, also by SIGKILL: then
# it ends them, and removes the folder if that is a temporary one.
_GUARD = 'while read -r line; do pids=$line; done; [ -z "$pids" ] || { kill -9 $pids; rm -rf -- "$1"; } 2>/dev/null'


class ProcessEnded(OutboxError):
    """A process of the demo ended although nobody asked it to."""


class Processes:
    """Starts, kills and stops the relay and the consumer. A context manager: leaving it ends both."""

    def __init__(self, folder: Folder) -> None:
        self._folder = folder
        self._running: dict[str, subprocess.Popen[bytes]] = {}

    def __enter__(self) -> Self:
        reader, self._to_guard = os.pipe()
        doomed = str(self._folder.path) if self._folder.is_temporary else ""
        self._guard = subprocess.Popen(  # noqa: S603 - a script of our own
            ["/bin/sh", "-c", _GUARD, "guard", doomed], stdin=reader, cwd="/", start_new_session=True
        )
        os.close(reader)
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._running.values():
            process.kill()
            process.wait()
        self._running.clear()
        self._tell_guard()
        os.close(self._to_guard)
        self._guard.wait()

    @property
    def relay_runs(self) -> bool:
        """Whether a relay was started and not killed."""
        return "relay" in self._running

    def start_relay(self) -> None:
        """Start a relay: what `outbox-relay run --config relay.toml` does."""
        self._start("relay", "-m", "outbox", "run", "--config", str(self._folder.relay_config))

    def start_consumer(self) -> None:
        """Start the consumer: what `outbox-consume outbox.demo.shipping:inbox` does."""
        self._start("consumer", *_CONSUMER, self._folder.broker_url)

    def kill_relay(self) -> None:
        """End the relay as a crash does: SIGKILL, which no process can see coming. Returns when it is gone."""
        relay = self._running.pop("relay")
        relay.kill()
        relay.wait()
        self._tell_guard()

    def stop(self) -> None:
        """Stop both in good order."""
        for process in self._running.values():
            process.send_signal(signal.SIGTERM)
        for process in self._running.values():
            try:
                process.wait(_STOP_S)
            except subprocess.TimeoutExpired:
                process.kill()

    def check(self) -> None:
        """Raise `ProcessEnded` with the last line of its log if one has ended by itself."""
        for name, process in self._running.items():
            if process.poll() is not None:
                last = self._folder.log(name).read_text(errors="replace").strip().rpartition("\n")[2]
                raise ProcessEnded(f"the {name} ended with exit code {process.returncode}: {last}")

    def _start(self, name: str, *arguments: str) -> None:
        with self._folder.log(name).open("ab") as log:
            # A session of its own, so that Ctrl-C reaches only the demo, which then stops it.
            self._running[name] = subprocess.Popen(  # noqa: S603 - our own interpreter and modules
                [sys.executable, *arguments],
                env=self._environment(),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self._tell_guard()

    def _environment(self) -> dict[str, str]:
        foreign = {name: value for name, value in os.environ.items() if not name.startswith("OUTBOX_")}
        return {**foreign, FOLDER_VARIABLE: str(self._folder.path)}

    def _tell_guard(self) -> None:
        os.write(self._to_guard, b" ".join(b"%d" % process.pid for process in self._running.values()) + b"\n")
