"""A private server: its own ports and folder under /tmp, and an end that no way of dying can skip."""

import random
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, ClassVar, Self

READY_SECONDS = 90
STOP_SECONDS = 60

# Reads the process ids to watch, one line per start of the server. At the end of its input, which comes when the
# tests close it and also when they die by any signal, it ends the last ones and removes the folder.
GUARD = """
while read -r line; do pids=$line; done
[ -z "$pids" ] || kill -s "$1" $pids 2>/dev/null
for _ in 1 2 3 4 5; do rm -rf -- "$2" && break; sleep 0.2; done
"""


def free_port() -> int:
    """A port on 127.0.0.1 that nothing uses, below the range the kernel gives to outgoing connections.

    Inside that range a client that keeps dialling a stopped server can be given the server's own port and
    connect to itself, after which the server cannot come back.
    """
    while True:
        port = random.randrange(20_000, 32_000)
        with socket.socket() as candidate:
            candidate.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                candidate.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port


class PrivateServer(ABC):
    """One server process that starts, stops and starts again with the same ports, folder and data.

    A context manager: entering starts it, leaving ends it and removes its folder.
    """

    name: ClassVar[str]
    kill_signal: ClassVar[signal.Signals]
    """Ends the server at once and leaves nothing of it in the system."""

    def __init__(self, *, owner: str | None = None) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix=f"outbox-{self.name}-", dir="/tmp"))
        if owner is not None:
            shutil.chown(self.folder, user=owner)
        self._process: subprocess.Popen[bytes] | None = None
        self._guard = subprocess.Popen(
            ["/bin/sh", "-c", GUARD, "guard", self.kill_signal.name.removeprefix("SIG"), str(self.folder)],
            stdin=subprocess.PIPE,
            cwd="/",
            start_new_session=True,
        )

    @abstractmethod
    def _launch(self) -> subprocess.Popen[bytes]:
        """Start the process, without waiting for it."""

    @abstractmethod
    def _connect(self) -> None:
        """Connect as a client does and disconnect; raise one of `_not_ready` while the server is not up."""

    _not_ready: ClassVar[tuple[type[Exception], ...]]

    def start(self) -> None:
        """Start the server and return when it accepts clients; does nothing when it is running."""
        if self.running:
            return
        self._process = self._launch()
        self._watch(self._process.pid)
        self._wait_until_ready(self._process)

    def restart(self) -> None:
        """Stop in good order and start again."""
        self.stop()
        self.start()

    @abstractmethod
    def stop(self) -> None:
        """Stop in good order; does nothing when the server is not running."""

    def kill(self) -> None:
        """End the server as a crash would."""
        self._end(self.kill_signal)

    @contextmanager
    def suspended(self) -> Iterator[None]:
        """Let the server hang: it keeps its connections and answers nothing."""
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)
        try:
            yield
        finally:
            self._process.send_signal(signal.SIGCONT)

    def close(self) -> None:
        """End the server for good, with its folder."""
        self.kill()
        self._watch()
        assert self._guard.stdin is not None
        self._guard.stdin.close()
        self._guard.wait()

    @property
    def running(self) -> bool:
        """Whether the process is alive."""
        return self._process is not None and self._process.poll() is None

    @property
    def log(self) -> str:
        """What the server has printed so far."""
        path = self.folder / "server.log"
        return path.read_text(errors="replace") if path.exists() else ""

    def __enter__(self) -> Self:
        try:
            self.start()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _spawn(self, command: Sequence[str | Path], *, env: Mapping[str, str], **options: Any) -> subprocess.Popen[bytes]:
        # A session of its own, so that Ctrl-C in the terminal reaches the tests first and they stop the server.
        with (self.folder / "server.log").open("ab") as log:
            return subprocess.Popen(
                command,
                cwd=self.folder,
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                **options,
            )

    def _end(self, how: signal.Signals) -> None:
        if self._process is None:
            return
        self._process.send_signal(how)
        self._process.wait(STOP_SECONDS)
        self._process = None

    def _watch(self, *pids: int) -> None:
        stdin: IO[bytes] | None = self._guard.stdin
        assert stdin is not None
        stdin.write(" ".join(map(str, pids)).encode() + b"\n")
        stdin.flush()

    def _wait_until_ready(self, process: subprocess.Popen[bytes]) -> None:
        deadline = time.monotonic() + READY_SECONDS
        while True:
            try:
                return self._connect()
            except self._not_ready as error:
                if process.poll() is not None:
                    message = f"{self.name} exited with status {process.returncode} while starting:\n{self.log[-4000:]}"
                    raise RuntimeError(message) from error
                if time.monotonic() > deadline:
                    message = f"{self.name} accepts no client after {READY_SECONDS} s:\n{self.log[-4000:]}"
                    raise TimeoutError(message) from error
            time.sleep(0.05)


def find_program(name: str, *folders: str) -> Path:
    """The program's path: from PATH, else from the newest of the folders (patterns under /) that has it."""
    if found := shutil.which(name):
        return Path(found)
    for folder in folders:
        for path in sorted(Path("/").glob(f"{folder}/{name}"), key=_version, reverse=True):
            return path
    raise FileNotFoundError(f"{name} is not installed here; `bash tests/servers/install.sh` installs it")


def _version(path: Path) -> list[int]:
    return [int(number) for number in "".join(c if c.isdigit() else " " for c in str(path)).split()]
