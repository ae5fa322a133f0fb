"""Runs two ways alternately, so that what else the machine does hits both."""

import os
import platform
import statistics
import time
from collections.abc import Callable, Mapping
from importlib.metadata import version
from pathlib import Path


def alternate(ways: Mapping[str, Callable[[], int]], *, pairs: int) -> dict[str, float]:
    """Return the median rate of each way, in items per second; a way does its work and returns how many items it did."""
    rates: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(pairs):
        for name, work in ways.items():
            began = time.perf_counter()
            done = work()
            rates[name].append(done / (time.perf_counter() - began))
    return {name: round(statistics.median(each), 1) for name, each in rates.items()}


def machine() -> dict[str, str]:
    """Say where and with what this was measured."""
    packages = ("kombu", "amqp", "sqlalchemy", "psycopg")
    return {
        "cores": str(os.cpu_count()),
        "processor": _value_of("/proc/cpuinfo", "model name"),
        "memory": _value_of("/proc/meminfo", "MemTotal"),
        "system": platform.platform(),
        "python": platform.python_version(),
        **{name: version(name) for name in packages},
    }


def _value_of(path: str, name: str) -> str:
    """Return what one of the kernel's lists says of a name."""
    for line in Path(path).read_text().splitlines():
        if line.startswith(name):
            return line.partition(":")[2].strip()
    return "unknown"
