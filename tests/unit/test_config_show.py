"""`outbox-relay config show`: every value with its origin, no secrets, no connection, and the error that `run` would end with."""

import json
import socket
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import sqlalchemy as sa
from click.testing import CliRunner, Result
from sqlalchemy.orm import sessionmaker

from outbox import Inbox
from outbox.cli import main
from outbox.cli.consume import main as consume
from outbox.cli.consume_run import run as consume_run
from outbox.cli.exit import USAGE
from outbox.cli.hiding import hidden
from outbox.cli.run import run

URLS = ("--database-url", "postgresql://app:geheim@127.0.0.1:1/shop", "--broker-url", "amqp://app:geheim@127.0.0.1:1/shop")


@pytest.fixture(autouse=True)
def _without_network(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise AssertionError("it connects")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket.socket, "bind", refuse)
    monkeypatch.setattr("psycopg.connect", refuse)


def show(*arguments: str, code: int = 0, **environment: str) -> Result:
    done = CliRunner().invoke(main, ["config", "show", *arguments], env=environment)
    assert done.exit_code == code, done.output
    assert "geheim" not in done.output
    return done


def shown(*arguments: str, code: int = 0, **environment: str) -> dict[str, Any]:
    return dict(json.loads(show("--json", *arguments, code=code, **environment).stdout))


def options_of(plain: dict[str, Any]) -> dict[str, tuple[Any, str]]:
    return {each["name"]: (each["value"], each["source"]) for each in plain["options"]}


def test_every_option_of_the_relay_is_there_in_its_order() -> None:
    names = [str(param.name) for param in run.params]
    assert [each["name"] for each in shown(*URLS)["options"]] == names
    assert [line.split()[0] for line in show(*URLS).stdout.splitlines()][: len(names)] == names


def test_each_value_is_as_it_was_written_and_says_where(tmp_path: Path) -> None:
    file = tmp_path / "relay.toml"
    file.write_text('lease = "2m"\nbatch_size = 7\nallow_unconfirmed = true\n')
    options = options_of(shown("--config", str(file), "--grace", "3s", *URLS, OUTBOX_BATCH_SIZE="8", OUTBOX_LOG_LEVEL="debug"))
    assert options["config"] == (str(file), "command line")
    assert options["grace"] == ("3s", "command line")
    assert options["batch_size"] == ("8", "environment OUTBOX_BATCH_SIZE")
    assert options["log_level"] == ("debug", "environment OUTBOX_LOG_LEVEL")
    assert options["lease"] == ("2m", f"file {file}")
    assert options["allow_unconfirmed"] == (True, f"file {file}")
    assert options["poll_interval"] == ("500ms", "default")
    assert options["retention"] == (None, "not set")


def test_the_text_says_the_same() -> None:
    text = show(*URLS, OUTBOX_LEASE="40s").stdout
    assert "lease                   40s" in text
    assert "environment OUTBOX_LEASE" in text
    assert "postgresql://app:***@127.0.0.1:1/shop" in text
    assert "retention               -" in text


def test_routes_and_policies_are_there_with_their_defaults(tmp_path: Path) -> None:
    file = tmp_path / "relay.toml"
    file.write_text('[[routes]]\ntopics = "orders.*"\nexchange = "shop"\n[[policies]]\ntopics = "x.#"\nmax_attempts = 3\n')
    plain = shown("--config", str(file), "--retry-ceiling", "90s", *URLS)
    assert [(each["topics"], each["exchange"]) for each in plain["routes"]] == [("orders.*", "shop"), ("#", "outbox")]
    policies = [(each["topics"], each["max_attempts"], each["retry_ceiling_s"]) for each in plain["policies"]]
    assert policies == [("x.#", 3, 90), ("#", 20, 90)]
    text = show("--config", str(file), *URLS).stdout
    assert "routes: topics = orders.*  exchange = shop" in text
    assert "policies: topics = x.#  max_attempts = 3" in text


@pytest.mark.parametrize(
    "arguments",
    [
        (),
        (*URLS, "--lease", "10s"),
        (*URLS, "--lease", "soon"),
        (*URLS, "--batch-size", "0", "--log-level", "loud"),
        (*URLS, "--retry-first", "10m"),
        (*URLS, "--inbox-retention", "10m"),
        (*URLS, "--wake", "pigeon"),
        (*URLS, "--wake-database-url", "postgresql://x"),
        (*URLS, "--wake-database-url-file", "/absent"),
        (*URLS, "--broker-ca", "/absent.pem"),
        (*URLS[:2], "--broker-url", "oracle://x"),
        (*URLS[:2], "--broker-url", "kafka://x"),
        ("--database-url", "oracle://x", *URLS[2:]),
        (*URLS, "--config", "/absent.toml"),
        ("--database-url-file", "/absent", *URLS[2:]),
    ],
)
def test_what_cannot_work_is_said_as_run_says_it_below_the_values(arguments: tuple[str, ...]) -> None:
    expected = CliRunner().invoke(main, ["run", *arguments])
    assert expected.exit_code == USAGE, expected.output
    done = show(*arguments, code=USAGE)
    assert error_in(done) == error_in(expected)
    assert len(done.stdout.splitlines()) >= len(run.params)
    plain = shown(*arguments, code=USAGE)
    assert f"Error: {plain['error']}" == error_in(expected)


def error_in(done: Result) -> str:
    return done.stderr[done.stderr.index("Error: ") :].strip()


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("lease = '41s'\nleese = 3\n", "unknown option leese"),
        ("lease = '41s'\n[[routes]]\nexchange = 'x'\n", "routes: topics is missing"),
        ("lease = '41s'\n[[policies]]\ntopics = '#'\nretry_first = '10m'\n", "policies: topics = '#': the first delay"),
    ],
)
def test_what_is_wrong_with_a_file_does_not_hide_what_it_says(tmp_path: Path, text: str, problem: str) -> None:
    file = tmp_path / "relay.toml"
    file.write_text(text)
    plain = shown("--config", str(file), *URLS, code=USAGE)
    assert problem in plain["error"]
    assert options_of(plain)["lease"] == ("41s", f"file {file}")


def test_a_certificate_that_is_left_out_in_silence_is_refused(tmp_path: Path) -> None:
    ca = tmp_path / "ca.pem"
    ca.write_text("-")
    assert "are for amqps://, not for amqp://" in shown(*URLS, "--broker-ca", str(ca), code=USAGE)["error"]


@pytest.mark.parametrize(
    ("text", "safe"),
    [
        ("amqp://app:geheim@mq//", "amqp://app:***@mq//"),
        ("amqp://app@mq//", "amqp://app@mq//"),
        ("amqp://a:geheim@one//;amqps://b:geheim@two//", "amqp://a:***@one//;amqps://b:***@two//"),
        ("amqp://a:ge/he@im@mq//", "amqp://a:***@mq//"),
        ("redis://:geheim@h/0", "redis://:***@h/0"),
        ("rq+rediss://:geheim@h/0?ssl_keyfile=/k&password=geheim", "rq+rediss://:***@h/0?ssl_keyfile=/k&password=***"),
        (
            "postgresql://db/shop?user=a&password=geheim&sslpassword=geheim",
            "postgresql://db/shop?user=a&password=***&sslpassword=***",
        ),
        ("postgresql://a@db/shop?password_file=/run/secrets/p", "postgresql://a@db/shop?password_file=/run/secrets/p"),
        ("postgresql://a@db/shop?passfile=/p", "postgresql://a@db/shop?passfile=/p"),
        ("https://h/?access_token=geheim&x=1", "https://h/?access_token=***&x=1"),
        ("host=db password=geheim dbname=x", "host=db password=*** dbname=x"),
        ("file:///run/secrets/url", "file:///run/secrets/url"),
        ("postgresql:///db?host=/run/postgresql", "postgresql:///db?host=/run/postgresql"),
        ("127.0.0.1:8080", "127.0.0.1:8080"),
    ],
)
def test_secrets_are_hidden_wherever_they_stand_and_nothing_else(text: str, safe: str) -> None:
    assert hidden("database_url", text) == safe


def test_an_option_whose_name_says_that_it_is_a_secret_is_hidden_whole() -> None:
    assert hidden("health_token", "geheim") == "***"
    assert hidden("dashboard_password", "geheim") == "***"
    assert hidden("broker_key", "/run/key.pem") == "/run/key.pem"


def test_the_consumer_shows_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = sa.create_engine("postgresql+psycopg://app:geheim@127.0.0.1:1/shop", pool_size=2, max_overflow=0)
    inbox, module = Inbox("shipping", sessions=sessionmaker(engine)), ModuleType("shop")
    inbox.transactional("#")(lambda _session, _message: None)
    vars(module)["inbox"] = inbox
    monkeypatch.setitem(sys.modules, "shop", module)

    done = CliRunner().invoke(consume, ["config", "shop:inbox", *URLS[2:], "--json"], env={"OUTBOX_WORKERS": "4"})
    plain = json.loads(done.stdout)
    assert [each["name"] for each in plain["options"]] == [str(param.name) for param in consume_run.params]
    assert options_of(plain)["workers"] == ("4", "environment OUTBOX_WORKERS")
    assert done.exit_code == USAGE
    assert "4 workers need 4 + 2 = 6 connections at once" in plain["error"]
    assert "geheim" not in done.output
