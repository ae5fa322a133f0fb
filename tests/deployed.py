"""What the files of examples/deploy say, read as their own tools read them."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from tests.story import ROOT

FOLDER = ROOT / "examples/deploy"
MANIFESTS = sorted(FOLDER.glob("kubernetes/*.yaml"))
PROBES = ("startupProbe", "livenessProbe", "readinessProbe")


@dataclass(frozen=True)
class Container:
    """A container of a manifest, in the pod that it is in."""

    file: Path
    pod: dict[str, Any]
    said: dict[str, Any]

    @property
    def command(self) -> list[str]:
        """The whole command line."""
        return [*self.said.get("command", []), *self.said.get("args", [])]

    @property
    def probes(self) -> dict[str, dict[str, Any]]:
        """Its probes by name."""
        return {name: self.said[name] for name in PROBES if name in self.said}

    def port_of(self, probe: str) -> int:
        """The number of the port that a probe asks."""
        ports = {each["name"]: each["containerPort"] for each in self.said["ports"]}
        return int(ports[self.said[probe]["httpGet"]["port"]])


def documents(path: Path) -> list[dict[str, Any]]:
    """All documents of a YAML file."""
    return list(yaml.safe_load_all(path.read_text(encoding="utf-8")))


def containers() -> Iterator[Container]:
    """All containers that run one of our programs."""
    for path in MANIFESTS:
        for document in documents(path):
            pod = document.get("spec", {}).get("template", {}).get("spec", {})
            for said in [*pod.get("initContainers", []), *pod.get("containers", [])]:
                if said.get("command"):
                    yield Container(path, pod, said)


def container(file: str) -> Container:
    """The one container of a manifest that runs one of our programs."""
    (found,) = (each for each in containers() if each.file.name == file)
    return found


def compose() -> dict[str, Any]:
    """The Compose file."""
    return documents(FOLDER / "compose.yaml")[0]


def option(command: list[str], name: str) -> str | None:
    """What a command line says for an option."""
    return command[command.index(name) + 1] if name in command else None


def seconds(text: str | int) -> float:
    """A time as these files write it: 30, 30s."""
    return float(str(text).removesuffix("s"))


def dockerfile() -> list[tuple[str, str]]:
    """The instructions of the Dockerfile, each with its arguments on one line."""
    text = re.sub(r"^#.*\n", "", (FOLDER / "Dockerfile").read_text(encoding="utf-8"), flags=re.MULTILINE)
    lines = [line for line in text.replace("\\\n", " ").splitlines() if line.strip()]
    return [(line.split(None, 1)[0], " ".join(line.split()[1:])) for line in lines]


def unit(path: Path = FOLDER / "systemd/outbox-relay.service") -> dict[str, str]:
    """The settings of the systemd unit; of one that is given twice the last."""
    lines = path.read_text(encoding="utf-8").splitlines()
    return dict(line.split("=", 1) for line in lines if "=" in line and not line.startswith("#"))


def environment() -> dict[str, str]:
    """The variables of the unit's environment file, also those that are commented out."""
    text = (FOLDER / "systemd/relay.env").read_text(encoding="utf-8")
    return dict(re.findall(r"^(?:# )?(OUTBOX_\w+)=(.*)$", text, re.MULTILINE))
