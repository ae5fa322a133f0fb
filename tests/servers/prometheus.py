"""Prometheus for the tests, with the configuration that a test gives it."""

import json
import os
import shutil
import signal
import subprocess
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

from tests.servers.proc import PrivateServer, find_program, free_port


class Prometheus(PrivateServer):
    """A private Prometheus on 127.0.0.1 that scrapes `targets` (addresses by job) each second, and evaluates rules."""

    name: ClassVar[str] = "prometheus"
    kill_signal: ClassVar[signal.Signals] = signal.SIGKILL
    _not_ready = (urllib.error.URLError, ConnectionError, TimeoutError)

    def __init__(self, targets: dict[str, str], *, rules: Sequence[Path] = ()) -> None:
        super().__init__()
        self.url = f"http://127.0.0.1:{free_port()}"
        for path in rules:
            shutil.copy(path, self.folder)
        configuration = {
            "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
            "rule_files": [path.name for path in rules],
            "scrape_configs": [{"job_name": job, "static_configs": [{"targets": [address]}]} for job, address in targets.items()],
        }
        (self.folder / "prometheus.yml").write_text(json.dumps(configuration), encoding="utf-8")

    def asks(self, path: str, **parameters: str) -> Any:
        """Return the data that its API answers with."""
        with urllib.request.urlopen(f"{self.url}/api/v1/{path}?{urllib.parse.urlencode(parameters)}", timeout=10) as reply:
            return json.load(reply)["data"]

    def stop(self) -> None:
        """Stop it in good order."""
        self._end(signal.SIGTERM)

    def _launch(self) -> subprocess.Popen[bytes]:
        command: list[str | Path] = [
            find_program("prometheus"),
            "--config.file=prometheus.yml",
            f"--storage.tsdb.path={self.folder}/data",
            f"--web.listen-address={self.url.removeprefix('http://')}",
        ]
        return self._spawn(command, env=os.environ)

    def _connect(self) -> None:
        urllib.request.urlopen(f"{self.url}/-/ready", timeout=5).close()
