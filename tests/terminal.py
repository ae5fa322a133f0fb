"""Types commands into a shell, as a reader of the documentation does."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from doctest import ELLIPSIS, NORMALIZE_WHITESPACE, OutputChecker
from pathlib import Path
from typing import Self, TypeVar

T = TypeVar("T")
WAIT_SECONDS = 60


def eventually(check: Callable[[], T], *, seconds: float = WAIT_SECONDS) -> T:
    """Repeat `check` until it raises no AssertionError, and return its result; after `seconds` let the error out."""
    deadline = time.monotonic() + seconds
    while True:
        try:
            return check()
        except AssertionError:
            if time.monotonic() > deadline:
                raise
        time.sleep(0.1)


def assert_shows(printed: str, expected: str) -> None:
    """Compare what was printed with what the documentation shows; `...` there is anything, and white space is all the same."""
    same = OutputChecker().check_output(expected, printed, ELLIPSIS | NORMALIZE_WHITESPACE)
    assert same, f"expected:\n{expected}\nprinted:\n{printed}"


class Terminal:
    """One folder and environment to run commands in. The commands of this Python's environment come first on PATH."""

    def __init__(self, folder: Path, variables: Mapping[str, str]) -> None:
        self.folder = folder
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        self.environment = {**os.environ, "PATH": path, **variables}

    def run(self, commands: Sequence[str]) -> str:
        """Run the commands, stopping at the first that fails; return what they print, on stderr too."""
        done = subprocess.run(
            _bash(commands),
            cwd=self.folder,
            env=self.environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=WAIT_SECONDS,
            check=False,
        )
        assert done.returncode == 0, f"exit code {done.returncode} of {commands}:\n{done.stdout}"
        return done.stdout

    def start(self, commands: Sequence[str], log: Path) -> "Program":
        """Run the commands in the background; the last one is the program that goes on running."""
        return Program([*commands[:-1], f"exec {commands[-1]}"], self, log)


class Program:
    """A program in the background that ends with code 0 on SIGTERM. A context manager, whose end it does not survive."""

    def __init__(self, commands: Sequence[str], terminal: Terminal, log: Path) -> None:
        self.commands = commands
        self._log = log
        with log.open("wb") as output:
            self._process = subprocess.Popen(
                _bash(commands),
                cwd=terminal.folder,
                env=terminal.environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
            )

    @property
    def output(self) -> str:
        """What it has printed so far, on stderr too."""
        return self._log.read_text(encoding="utf-8")

    def wait_for(self, text: str) -> None:
        """Wait until it has printed the text."""
        eventually(lambda: self._has_printed(text))

    def stop(self) -> None:
        """Stop it by SIGTERM, and see that it exits with code 0."""
        self._process.send_signal(signal.SIGTERM)
        code = self._process.wait(WAIT_SECONDS)
        assert code == 0, f"exit code {code} of {self.commands} after SIGTERM:\n{self.output}"

    def check_running(self) -> None:
        """Raise `RuntimeError`, which nobody waits out, if it has ended by itself."""
        if (code := self._process.poll()) is not None:
            raise RuntimeError(f"{self.commands} ended by itself with exit code {code}:\n{self.output}")

    def _has_printed(self, text: str) -> None:
        self.check_running()
        assert text in self.output, f"{self.commands} has not printed {text!r}:\n{self.output}"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()


def _bash(commands: Sequence[str]) -> list[str]:
    return ["bash", "-euo", "pipefail", "-c", "\n".join(commands)]
