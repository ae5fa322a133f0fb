"""The files of examples/deploy: each passes the check of its kind, and says what our programs understand."""

import json
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import click
import compose_spec
import kubernetes_validate
import pytest
from yamllint import linter
from yamllint.config import YamlLintConfig

from outbox.cli import config
from tests import deployed
from tests.commandlines import parameters
from tests.story import ROOT

URLS = {"OUTBOX_DATABASE_URL": "postgresql+psycopg://shop@postgres/shop", "OUTBOX_BROKER_URL": "amqp://rabbitmq//"}
ORDERS = ROOT / "examples/orders"
CONTAINERS = [pytest.param(each, id=f"{each.file.stem}-{each.said['name']}") for each in deployed.containers()]
SERVICES = [name for name, service in deployed.compose()["services"].items() if "build" in service]
YAML = sorted((ROOT / "examples").glob("[dm]*/**/*.y*ml"))
# The oldest release with sidecars that are on by default, and the newest that is known.
KUBERNETES = ["1.29", kubernetes_validate.latest_version()]
OURS = ("outbox-relay", "outbox-consume")


def understood(command, variables=URLS, *, folder):
    """What one of our programs makes of a command line, with the files of the image and of the secret where they are here."""
    settings = folder / "relay.toml"
    settings.write_text(secrets()["relay.toml"])
    places = {"/etc/outbox/relay.toml": str(settings), "/srv/shop/relay.toml": str(ORDERS / "relay.toml")}
    places["relay.toml"] = places["/srv/shop/relay.toml"]
    return parameters([places.get(each, each) for each in command], variables)


def secrets():
    documents = deployed.documents(deployed.FOLDER / "kubernetes/secret.yaml")
    return {key: value for document in documents for key, value in document["stringData"].items()}


# --- The Dockerfile


def test_the_dockerfile_passes_hadolint():
    program = Path(sys.executable).parent / "hadolint"
    command = [program, "--failure-threshold=style", deployed.FOLDER / "Dockerfile"]
    found = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (found.returncode, found.stdout) == (0, "")


def test_the_image_runs_the_relay_itself_as_nobody_and_brings_nothing_that_builds():
    instructions = deployed.dockerfile()
    last = instructions[max(index for index, (name, _) in enumerate(instructions) if name == "FROM") :]
    assert ("USER", "10001:10001") in last
    assert ("CMD", '["outbox-relay", "run"]') in last
    assert "RUN" not in {name for name, _ in last}
    assert all("latest" not in value and ":" in value for name, value in instructions if value.startswith("PYTHON_IMAGE="))


def test_what_the_dockerfile_copies_is_there_and_not_ignored():
    ignored = (deployed.FOLDER / "Dockerfile.dockerignore").read_text().split()
    for name, value in deployed.dockerfile():
        if name == "COPY" and not value.startswith("--from"):
            *sources, _ = value.split()
            for source in sources:
                assert (ROOT / source).exists()
                assert f"!{source}" in ignored


@pytest.mark.matrix
def test_what_the_dockerfile_runs_installs_the_programs_and_no_pip(tmp_path):
    source, target = tmp_path / "source", tmp_path / "shop"
    source.mkdir()
    for name, value in deployed.dockerfile():
        if name == "COPY" and not value.startswith("--from"):
            *sources, _ = value.split()
            for each in sources[: None if (ROOT / sources[0]).is_file() else 1]:
                copy = shutil.copytree if (ROOT / each).is_dir() else shutil.copy
                copy(ROOT / each, source / Path(each).name)
    (run,) = [value for name, value in deployed.dockerfile() if name == "RUN"]
    subprocess.run(["sh", "-ec", run.replace("/opt/shop", str(target))], cwd=source, check=True, timeout=110)
    for program in OURS:
        subprocess.run([target / "bin" / program, "--version"], check=True, capture_output=True)
    assert not list(target.glob("bin/pip*"))


# --- The Compose file


def test_the_compose_file_is_one():
    # The library takes no YAML merges (<<), which Compose resolves like any reader of YAML.
    assert set(compose_spec.PyCompose.from_json(json.dumps(deployed.compose())).service_names()) >= {
        "postgres",
        "rabbitmq",
        "relay",
        "consumer",
    }


def test_a_misspelt_key_of_the_compose_file_would_be_found():
    said = deployed.compose()
    said["services"]["relay"]["stop_graceperiod"] = "30s"
    with pytest.raises(ValueError, match="stop_graceperiod"):
        compose_spec.PyCompose.from_json(json.dumps(said))


@pytest.mark.parametrize("name", SERVICES)
def test_what_compose_starts_is_understood(name, tmp_path):
    service = deployed.compose()["services"][name]
    if service["command"][0] in OURS:
        understood(service["command"], service["environment"], folder=tmp_path)
    else:
        assert service["command"][0] in {"alembic", "python"}


@pytest.mark.parametrize("name", ["relay", "consumer"])
def test_compose_lets_a_program_finish_and_asks_how_it_is_where_it_answers(name):
    service = deployed.compose()["services"][name]
    grace = deployed.seconds(deployed.option(service["command"], "--grace"))
    assert deployed.seconds(service["stop_grace_period"]) == grace + 10
    port = deployed.option(service["command"], "--health").rpartition(":")[2]
    assert f"http://127.0.0.1:{port}/readyz" in service["healthcheck"]["test"][-1]


def test_neither_the_application_nor_the_relay_waits_for_the_broker():
    services = deployed.compose()["services"]
    assert all("rabbitmq" not in services[name].get("depends_on", {}) for name in ("app", "relay", "consumer"))


# --- The manifests


@pytest.mark.parametrize("version", KUBERNETES)
@pytest.mark.parametrize("path", deployed.MANIFESTS, ids=lambda path: path.stem)
def test_a_manifest_is_what_kubernetes_takes(path, version):
    for document in deployed.documents(path):
        kubernetes_validate.validate(document, version, strict=True)


def test_a_misspelt_field_of_a_manifest_would_be_found():
    document = deployed.documents(deployed.FOLDER / "kubernetes/relay.yaml")[0]
    document["spec"]["template"]["spec"]["terminationGracePeriod"] = 30
    with pytest.raises(kubernetes_validate.ValidationError, match="terminationGracePeriod"):
        kubernetes_validate.validate(document, KUBERNETES[-1], strict=True)


@pytest.mark.parametrize("path", YAML, ids=lambda path: path.stem)
def test_yaml_is_in_good_form(path):
    rules = "{extends: default, rules: {line-length: {max: 130}, document-start: disable, braces: {min-spaces-inside: 0}}}"
    assert not [str(each) for each in linter.run(path.read_text(), YamlLintConfig(rules))]


@pytest.mark.parametrize("container", CONTAINERS)
def test_what_a_container_runs_is_understood(container, tmp_path):
    variables = {name: value for name, value in secrets().items() if name.isupper()}
    if container.file.name == "relay.yaml":
        variables = {}  # its file has it all
    understood(container.command, variables, folder=tmp_path)


def test_an_option_that_was_renamed_would_be_found(tmp_path):
    with pytest.raises(click.NoSuchOption):
        understood([*deployed.container("relay.yaml").command, "--graze", "5s"], folder=tmp_path)


def test_the_routes_of_the_secret_are_those_of_the_application():
    mine, others = tomllib.loads(secrets()["relay.toml"]), tomllib.loads((ORDERS / "relay.toml").read_text())
    assert config.routes(mine["routes"]) == config.routes(others["routes"])


@pytest.mark.parametrize("container", CONTAINERS)
def test_a_container_is_locked_up_and_limited(container):
    assert container.pod["securityContext"]["runAsNonRoot"]
    assert container.pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert not container.pod["automountServiceAccountToken"]
    assert container.said["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    assert set(container.said["resources"]["requests"]) == {"cpu", "memory"}
    assert set(container.said["resources"]["limits"]) == {"memory"}, "a relay that is throttled looks like one that hangs"


@pytest.mark.parametrize("container", [each for each in CONTAINERS if each.values[0].probes])
def test_a_probe_asks_where_the_program_answers_and_waits_for_the_database_check(container):
    where = deployed.option(container.command, "--health")
    for name, probe in container.probes.items():
        assert where == f"0.0.0.0:{container.port_of(name)}"
        assert probe["timeoutSeconds"] > 2


def test_a_sidecar_comes_first_stays_and_has_no_say_in_whether_the_pod_is_ready():
    sidecar = deployed.container("app-with-sidecar.yaml")
    assert sidecar.said in sidecar.pod["initContainers"]
    assert sidecar.said["restartPolicy"] == "Always"
    assert set(sidecar.probes) == {"startupProbe", "livenessProbe"}
    assert sidecar.probes["startupProbe"]["httpGet"]["path"] == "/readyz", "/startupz waits for the broker"


@pytest.mark.parametrize("file", ["relay.yaml", "consumer.yaml"])
def test_a_deployment_has_all_probes_and_waits_for_its_servers_without_falling_into_the_growing_pauses(file):
    probes = deployed.container(file).probes
    paths = {name: probe["httpGet"]["path"] for name, probe in probes.items()}
    assert paths == {"startupProbe": "/startupz", "livenessProbe": "/livez", "readinessProbe": "/readyz"}
    waits = probes["startupProbe"]["periodSeconds"] * probes["startupProbe"]["failureThreshold"]
    assert waits > 600, "what has run for ten minutes is started again without a growing pause"


@pytest.mark.parametrize(("file", "others"), [("relay.yaml", 0), ("consumer.yaml", 0), ("app-with-sidecar.yaml", 20)])
def test_kubernetes_lets_a_program_finish(file, others):
    container = deployed.container(file)
    grace = deployed.seconds(deployed.option(container.command, "--grace"))
    spare = 5 if others else 10
    assert container.pod["terminationGracePeriodSeconds"] == others + grace + spare


@pytest.mark.parametrize("file", ["relay.yaml", "consumer.yaml"])
def test_a_node_that_is_drained_leaves_all_but_one(file):
    deployment, budget = deployed.documents(deployed.FOLDER / "kubernetes" / file)
    assert budget["spec"]["selector"] == deployment["spec"]["selector"]
    assert budget["spec"]["maxUnavailable"] < deployment["spec"]["replicas"]


def test_the_migration_ends_at_what_no_further_try_can_help():
    (job,) = deployed.documents(deployed.FOLDER / "kubernetes/migrate.yaml")
    (rule,) = job["spec"]["podFailurePolicy"]["rules"]
    assert (rule["action"], rule["onExitCodes"]["values"]) == ("FailJob", [2, 5])


# --- The systemd unit


@pytest.mark.skipif(not shutil.which("systemd-analyze"), reason="systemd is not installed")
def test_systemd_finds_nothing_wrong_with_the_unit(tmp_path):
    unit = tmp_path / "outbox-relay.service"
    text = (deployed.FOLDER / "systemd/outbox-relay.service").read_text()
    unit.write_text(text.replace("/opt/shop/bin/outbox-relay", f'"{Path(sys.executable).parent}/outbox-relay"'))
    found = subprocess.run(["systemd-analyze", "verify", unit], capture_output=True, text=True, check=False)
    assert found.returncode == 0
    assert "Unknown" not in found.stderr


def test_the_unit_lets_the_relay_finish_and_watches_it_as_the_lease_does():
    unit, variables = deployed.unit(), deployed.environment()
    assert deployed.seconds(unit["TimeoutStopSec"]) == deployed.seconds(variables["OUTBOX_GRACE"]) + 10
    assert deployed.seconds(unit["WatchdogSec"]) == deployed.seconds(variables["OUTBOX_LEASE"])


def test_what_the_unit_runs_is_understood_with_its_variables(tmp_path):
    variables = deployed.environment() | {"OUTBOX_CONFIG": str(ORDERS / "relay.toml")}
    program, *arguments = deployed.unit()["ExecStart"].split()
    given = parameters([Path(program).name, *arguments], variables)
    known = {f"OUTBOX_{name.upper()}" for name in given} | {"OUTBOX_CONFIG"}
    assert set(variables) <= known
    assert (given["grace"], given["poll_interval"]) == (20, 2)


# --- The README


def test_the_readme_names_every_file_and_commands_that_there_are(tmp_path):
    readme = (deployed.FOLDER / "README.md").read_text()
    for path in deployed.FOLDER.rglob("*.*"):
        assert path.name in readme
    commands = re.findall(r"`(outbox-(?:relay|consume) [^`]+)`", readme)
    assert commands
    for command in commands:
        parameters(shlex.split(command), URLS)
