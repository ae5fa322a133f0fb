"""The TOML file, and which of flag, environment, file and default wins."""

import importlib
import re
import threading

import pytest
from click.testing import CliRunner

from outbox.cli import main
from outbox.cli.exit import USAGE
from outbox.routes import Route

URLS = 'database_url = "sqlite:///file.db"\nbroker_url = "memory://"\n'


@pytest.fixture
def write(tmp_path):
    """Write a TOML file, and return its path."""

    def write(text):
        path = tmp_path / "relay.toml"
        path.write_text(text, encoding="utf-8")
        return str(path)

    return write


@pytest.fixture
def settings_of(monkeypatch):
    """Run `outbox-relay run` with these arguments up to where the relay would start; return its settings."""
    module = importlib.import_module("outbox.cli.run")  # the package has a command of that name
    found = []
    monkeypatch.setattr(module, "run_relay", lambda settings, _stop, **_more: found.append(settings))
    monkeypatch.setattr(module, "stop_on_signals", threading.Event)
    monkeypatch.setattr(module.logs, "setup", lambda *_, **__: None)

    def settings_of(*arguments, **environment):
        result = CliRunner().invoke(main, ["run", *arguments], env=environment)
        assert result.exit_code == 0, result.output
        return found.pop()

    return settings_of


def refusal(*arguments, command="run"):
    """Run a command that is to be refused; return what it wrote on stderr."""
    result = CliRunner().invoke(main, [command, *arguments])
    assert result.exit_code == USAGE, result.output
    assert result.stdout == ""
    assert "Traceback" not in result.stderr
    return result.stderr


def test_a_file_gives_every_option_and_the_routes(write, settings_of):
    settings = settings_of(
        "--config",
        write(
            URLS + 'schema = "app"\nlease = "1m"\nconfirm_timeout = 40\npoll_interval = 0.25\nbatch_size = 50\ngrace = "5s"\n'
            'max_attempts = 3\nretry_first = "2s"\nretry_ceiling = "1h"\nallow_unconfirmed = true\nlog_level = "debug"\n'
            '[[routes]]\ntopics = "orders.*"\nexchange = "shop"\nexchange_type = "direct"\nrouting_key = "{key}"\n'
            'queues = ["orders"]\n[[routes]]\ntopics = "#"\ndeclare = false\n'
        ),
    )

    assert (settings.database_url, settings.broker_url, settings.schema) == ("sqlite:///file.db", "memory://", "app")
    assert (settings.lease_s, settings.confirm_timeout_s, settings.poll_interval_s) == (60, 40, 0.25)
    assert (settings.batch_size, settings.grace_s, settings.allow_unconfirmed) == (50, 5, True)
    assert (
        settings.policies.default.max_attempts,
        settings.policies.default.backoff.first_s,
        settings.policies.default.backoff.ceiling_s,
    ) == (3, 2, 3600)
    assert settings.routes.routes == (
        Route("orders.*", exchange="shop", exchange_type="direct", routing_key="{key}", queues=["orders"]),
        Route("#", declare=False),
    )


def test_a_flag_wins_over_the_environment_over_the_file_over_the_default(write, settings_of):
    without, with_lease = write(URLS), None
    assert settings_of("--config", without).lease_s == 30

    with_lease = write(URLS + 'lease = "41s"\n')
    assert settings_of("--config", with_lease).lease_s == 41
    assert settings_of("--config", with_lease, OUTBOX_LEASE="42s").lease_s == 42
    assert settings_of("--config", with_lease, "--lease", "43s", OUTBOX_LEASE="42s").lease_s == 43


def test_the_file_itself_can_be_named_by_the_environment(write, settings_of):
    assert settings_of(OUTBOX_CONFIG=write(URLS)).database_url == "sqlite:///file.db"


def test_the_flag_config_works_wherever_it_stands(write, settings_of):
    settings = settings_of("--batch-size", "7", "--config", write(URLS + "batch_size = 9\nmax_attempts = 9\n"))

    assert (settings.batch_size, settings.policies.default.max_attempts) == (7, 9)


@pytest.mark.parametrize("environment", [{}, {"OUTBOX_ALLOW_UNCONFIRMED": ""}, {"OUTBOX_ALLOW_UNCONFIRMED": "0"}])
def test_unconfirmed_is_allowed_only_when_said_so(write, settings_of, environment):
    assert settings_of("--config", write(URLS), **environment).allow_unconfirmed is False
    assert settings_of("--config", write(URLS), OUTBOX_ALLOW_UNCONFIRMED="1").allow_unconfirmed is True


def test_an_unknown_option_is_refused_with_those_that_are_known(write):
    error = refusal("--config", write(URLS + "leese = 3\nbatchsize = 4\n"))

    assert "unknown option batchsize, leese; known are: database_url, database_url_file, broker_url" in error


def test_an_option_is_named_as_in_the_file_and_not_as_on_the_command_line(write):
    assert "unknown option batch-size" in refusal("--config", write(URLS + "batch-size = 3\n"))


@pytest.mark.parametrize("text", ["lease = ", "lease: 30s", "[routes", "lease = 1\nlease = 2"])
def test_what_is_not_toml_is_said_with_the_place(write, text):
    error = refusal("--config", write(text))

    assert "relay.toml: not valid TOML: " in error
    assert "at line" in error or "at end of document" in error


def test_a_file_that_is_not_text_is_no_toml(tmp_path):
    path = tmp_path / "relay.toml"
    path.write_bytes(b"\xff\xfe")

    assert "not valid TOML" in refusal("--config", str(path))


def test_a_missing_file_is_said_by_name(tmp_path):
    assert f"{tmp_path / 'absent.toml'}: No such file or directory" in refusal("--config", str(tmp_path / "absent.toml"))


def test_a_folder_is_no_file(tmp_path):
    assert "is a directory" in refusal("--config", str(tmp_path))


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("lease = true", "is not a time"),
        ('lease = "soon"', "is not a time"),
        ("lease = nan", "is not a time"),
        ("lease = 10", "must be at least 5 s longer than confirm-timeout"),
        ("batch_size = 0", "0 is not in the range"),
        ('batch_size = "many"', "is not a valid integer"),
        ("batch_size = 99.5", "99.5 is not a whole number"),
        ("max_attempts = 2.5", "2.5 is not a whole number"),
        ("max_attempts = true", "True is not a whole number"),
        ('log_level = "loud"', "is not one of"),
        ("poll_interval = 0", "poll-interval must be a number more than zero"),
    ],
)
def test_a_value_that_cannot_work_is_refused(write, text, problem):
    assert problem in refusal("--config", write(URLS + text))


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("routes = 3", "one [[routes]] table for each route"),
        ("[routes]\ntopics = '#'", "one [[routes]] table for each route"),
        ("[[routes]]\nexchange = 'x'", "routes: topics is missing; known are: topics, exchange"),
        ("[[routes]]\ntopic = '#'", "routes: unknown topic; known are: topics, exchange"),
        ("[[routes]]\ntopics = 'a b'", "route 'a b': topics is not a topic pattern"),
        ("[[routes]]\ntopics = 5", "route 5: topics is 5; write a text"),
        ("[[routes]]\ntopics = '#'\nqueues = 'orders'", "queues is 'orders'; write a list"),
        ("[[routes]]\ntopics = '#'\nrouting_key = '{partition}'", "may contain only {topic}, {key} and {type}"),
        ("[[routes]]\ntopics = '#'\nrouting_key = 5", "routing_key is 5; write a text"),
    ],
)
@pytest.mark.parametrize("command", ["run", "status"])
def test_a_route_that_cannot_work_is_refused_by_every_command(write, text, problem, command):
    assert problem in refusal("--config", write(URLS + text), command=command)


def test_without_a_database_url_the_text_names_the_option_and_the_variable():
    error = refusal("--broker-url", "memory://")

    assert "Missing option '--database-url'" in error
    assert "OUTBOX_DATABASE_URL" in error


def test_the_format_and_the_source_are_settings_and_a_route_may_say_another(write, settings_of):
    routes = settings_of("--config", write(URLS)).routes
    assert (routes.format, routes.source, routes.format_of("a")) == ("outbox", "", "outbox")

    text = 'format = "cloudevents"\nsource = "/shop"\n[[routes]]\ntopics = "a.*"\nformat = "cloudevents-structured"\n'
    routes = settings_of("--config", write(URLS + text)).routes
    assert (routes.format_of("a.b"), routes.format_of("b"), routes.source) == ("cloudevents-structured", "cloudevents", "/shop")
    routes = settings_of("--config", write(URLS + text), OUTBOX_FORMAT="outbox", OUTBOX_SOURCE="https://shop.example").routes
    assert (routes.format_of("a.b"), routes.format_of("b"), routes.source) == (
        "cloudevents-structured",
        "outbox",
        "https://shop.example",
    )


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ('format = "cloudevents"\n', "format cloudevents needs a source: .*--source /shop"),
        ('[[routes]]\ntopics = "a"\nformat = "cloudevents-structured"\n', "format cloudevents-structured needs a source"),
        ('source = "my shop"\n', "source is 'my shop'; write a URI or a path of at most 255 characters"),
        ('format = "avro"\n', "'avro' is not one of"),
        ('[[routes]]\ntopics = "a"\nformat = "avro"\n', "route 'a': format is 'avro'; use one of outbox, cloudevents, cloud"),
        ('[[routes]]\ntopics = "a"\nformat = 7\n', "route 'a': format is 7"),
    ],
)
def test_a_format_that_cannot_work_is_refused(write, text, problem):
    assert re.search(problem, " ".join(refusal("--config", write(URLS + text)).split()))
