"""The benchmarks work: each runs in a tiny size, grades what it has done, and prints the figures that it promises."""

import json
import os
import subprocess
import sys

import pytest

from tests.faults.processes import ROOT

TINY = {
    "OUTBOX_PERF_ROWS": "1000",
    "OUTBOX_PERF_RELAYS": "2",
    "OUTBOX_PERF_DELIVERED": "500",
    "OUTBOX_PERF_LARGE": "5",
    "OUTBOX_PERF_BATCH": "500",
}
FIGURES = {
    "throughput": {
        "relay_per_s", "publish_only_per_s", "confirm_each_per_s", "ratio_to_publish_only", "ratio_to_confirm_each",
    },
    "cost": {"statements", "wal_bytes", "rows_written", "relay_cpu_us", "database_cpu_us"},
    "scaling": {"keys_1_per_s", "keys_2_per_s", "no_keys_1_per_s", "hot_key_2_per_s", "hot_key_ratio_to_one_partition"},
    "memory": {"relay_waiting_mib", "consumer_waiting_mib", "relay_large_mib", "consumer_large_mib"},
}  # fmt: skip


@pytest.mark.matrix
@pytest.mark.parametrize("scenario", FIGURES)
def test_a_benchmark_prints_its_figures_as_one_json_object(scenario):
    done = subprocess.run(
        [sys.executable, "-m", "tests.perf", scenario, "--pairs", "1", "--json"],
        check=True, cwd=ROOT, env=os.environ | TINY, capture_output=True, text=True, timeout=110,
    )  # fmt: skip
    printed = json.loads(done.stdout.splitlines()[-1])

    assert printed["scenario"] == scenario
    assert {"cores", "python"} <= printed["machine"].keys()
    assert FIGURES[scenario] <= printed.keys()
    assert all(printed[name] > 0 for name in FIGURES[scenario])


def test_what_cannot_be_measured_is_said():
    done = subprocess.run([sys.executable, "-m", "tests.perf", "nothing"], check=False, cwd=ROOT, capture_output=True, text=True)

    assert done.returncode == 2
    assert "throughput" in done.stderr
    assert "parts" not in done.stderr
