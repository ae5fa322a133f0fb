"""The containers of examples/deploy as real processes: what their probes hear, and how they stop."""

import os
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from functools import partial

import pytest

from tests import deployed
from tests.faults import processes
from tests.faults.proxy import Proxy
from tests.integration.consuming import until
from tests.integration.test_health import ask, port_of
from tests.integration.test_rabbitmq_publisher import with_url
from tests.rows import insert
from tests.servers.proc import free_port
from tests.story import ROOT


@contextmanager
def running(container, database_url, broker_url, *options):
    """The container's command line as a process, on a port that is free here and with the settings of examples/orders."""
    command = [str(ROOT / "examples/orders/relay.toml") if each.endswith("relay.toml") else each for each in container.command]
    command += ["--health", "127.0.0.1:0", *options]
    if "--wake" in command:
        command += ["--wake", f"udp://127.0.0.1:{free_port()}"]
    variables = {"OUTBOX_DATABASE_URL": database_url, "OUTBOX_BROKER_URL": broker_url}
    program = processes.Program("container", ["-m", "outbox", *command[1:]], variables, ready="relay started")
    with program:
        yield program, partial(ask, port_of(program))


def heard(container, asked):
    """What each probe hears, as a status."""
    return {name: asked(probe["httpGet"]["path"])[0] for name, probe in container.probes.items()}


def test_a_sidecar_lets_the_application_start_while_the_broker_is_away(database_url, vhost_url, engine):
    sidecar = deployed.container("app-with-sidecar.yaml")
    with running(sidecar, database_url, with_url(vhost_url, port=free_port())) as (program, asked):
        until(lambda: heard(sidecar, asked) == {"startupProbe": 200, "livenessProbe": 200})
        program.wait_for_log("server=broker")
        assert asked("/startupz")[0] == 503
        assert heard(sidecar, asked) == {"startupProbe": 200, "livenessProbe": 200}
        assert program.terminate() == 0


def test_a_rollout_to_a_wrong_address_of_the_broker_gets_no_further(database_url, vhost_url, engine):
    relay = deployed.container("relay.yaml")
    with running(relay, database_url, with_url(vhost_url, port=free_port())) as (program, asked):
        program.wait_for_log("server=broker")
        assert heard(relay, asked)["startupProbe"] == 503
    with running(relay, database_url, vhost_url) as (_, asked):
        until(lambda: set(heard(relay, asked).values()) == {200})


@pytest.mark.parametrize("file", [pytest.param("relay.yaml", marks=pytest.mark.matrix), "app-with-sidecar.yaml"])
def test_a_relay_that_waits_for_confirms_ends_within_the_grace_and_half_of_what_is_to_spare(
    file, database_url, vhost_url, engine
):
    container = deployed.container(file)
    spare_s = 5 if "sidecar" in file else 10
    with Proxy(vhost_url) as proxy, running(container, database_url, proxy.url, "--grace", "1s") as (program, asked):
        until(lambda: asked("/startupz")[0] == 200)
        proxy.stall()
        insert(engine, *"abc")
        until(lambda: "publishing" in asked("/livez?json")[1])
        began = time.monotonic()
        assert program.terminate() == 0
        assert time.monotonic() - began < 1 + spare_s / 2


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make a process 1")
def test_as_process_1_a_relay_hears_sigterm(database_url, vhost_url, engine):
    command = ["unshare", "--pid", "--fork", "--kill-child", sys.executable, "-m", "outbox", "run"]
    variables = {**os.environ, "OUTBOX_DATABASE_URL": database_url, "OUTBOX_BROKER_URL": vhost_url}
    with subprocess.Popen(command, cwd=ROOT, env=variables, stderr=subprocess.PIPE, text=True) as program:
        try:
            assert any("relay started" in line for line in iter(program.stderr.readline, ""))
            children = subprocess.run(["pgrep", "-P", str(program.pid)], capture_output=True, text=True, check=True).stdout
            (relay,) = map(int, children.split())
            os.kill(relay, signal.SIGTERM)
            assert program.wait(20) == 0
            assert "relay stopped" in program.stderr.read()
        finally:
            program.kill()
