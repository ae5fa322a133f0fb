"""What the files of examples/monitoring ask Prometheus for."""

import json
import re
from collections.abc import Iterator
from typing import Any

import yaml

from tests.story import ROOT

FOLDER = ROOT / "examples/monitoring"
ALERTS = FOLDER / "alerts.yaml"


def rules() -> list[dict[str, Any]]:
    """The alerts."""
    return [rule for group in yaml.safe_load(ALERTS.read_text(encoding="utf-8"))["groups"] for rule in group["rules"]]


def dashboard() -> dict[str, Any]:
    """The dashboard."""
    return dict(json.loads((FOLDER / "dashboard.json").read_text(encoding="utf-8")))


def panels() -> list[dict[str, Any]]:
    """The panels, without the rows' own."""
    return [panel for panel in dashboard()["panels"] if panel["type"] != "row"]


def queries() -> Iterator[tuple[str, str]]:
    """Each panel's title with each of its queries, as Grafana sends them for all jobs."""
    for panel in panels():
        for target in panel["targets"]:
            yield panel["title"], target["expr"].replace("$__rate_interval", "10s").replace("$job", ".*")


def metrics(expression: str) -> set[str]:
    """The metrics that an expression names."""
    return set(re.findall(r"\boutbox_\w+", expression))
