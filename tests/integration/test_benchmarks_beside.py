"""The benchmarks run, at sizes at which their figures say nothing: what they count of the messages must be right."""

import json
import os
import subprocess
import sys

import pytest

from tests.faults.processes import ROOT

TINY = {
    "waiting": {"MESSAGES": 2000, "SCHEDULED": 2000, "BLOCKED": 300, "DEAD": 300},
    "latency": {"SECONDS": 2, "SILENCE_S": 2},
    "enqueue": {"TRANSACTIONS": 32, "BULK": 200},
    "failover": {"MESSAGES": 3000, "LEASE_S": 6, "WARM_S": 0},
    "inbox": {"MESSAGES": 200, "BATCH": 20},
}
FIELDS = {
    "waiting": ("clean_per_s", "loaded_per_s", "ratio", "claim_buffers_growth_beside", "claim_buffers_growth"),
    "latency": ("p50_ms_at_1", "p99_ms_at_1000", "idle_queries_per_s", "idle_cpu_percent"),
    "enqueue": ("ratio_to_plain_insert", "enqueue_many_per_s", "ratio_to_copy"),
    "failover": ("failover_p50_s", "failover_max_s"),
    "inbox": ("ratio", "ratio_loop_in_batches"),
}


@pytest.mark.matrix
@pytest.mark.timeout(300)
@pytest.mark.parametrize("scenario", TINY)
def test_it_runs_and_loses_nothing(scenario):
    sizes = {f"OUTBOX_PERF_{name}": str(value) for name, value in TINY[scenario].items()}
    command = [sys.executable, "-m", "tests.perf", scenario, "--pairs", "1", "--json"]
    done = subprocess.run(command, cwd=ROOT, env=os.environ | sizes, capture_output=True, text=True, check=False, timeout=280)
    assert done.returncode == 0, done.stderr
    results = json.loads(done.stdout.splitlines()[-1])
    assert results["scenario"] == scenario
    assert all(results[field] >= 0 for field in FIELDS[scenario])
