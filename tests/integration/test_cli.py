"""The command line as people use it: what it shows, and what it says about what cannot work."""

import json
import os
import signal
import subprocess
import sys
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from urllib.parse import urlsplit, urlunsplit
from uuid import uuid4

import amqp
import click
import kombu
import pytest
import sqlalchemy as sa
from click.testing import CliRunner

from outbox.cli import main
from outbox.cli.exit import BROKER, DATABASE, FAILURE, SCHEMA, USAGE
from outbox.policies import Policies
from outbox.relay import Transactions
from outbox.states import State
from outbox.tables import DEFAULT
from tests.integration.consuming import until
from tests.rows import insert, partition, sqlite_database
from tests.servers.proc import free_port

ROOT = Path(__file__).parents[2]
AWAY = f"amqp://guest:guest@127.0.0.1:{free_port()}//"
SECRET = "geheim"


def command(*arguments):
    return [sys.executable, "-m", "outbox", *arguments]


def environment():
    return {name: value for name, value in os.environ.items() if not name.startswith("OUTBOX_")} | {"PYTHONPATH": str(ROOT)}


def relay(*arguments):
    """Run the command in a process of its own until it ends."""
    return subprocess.run(command(*arguments), env=environment(), check=False, capture_output=True, text=True, timeout=60)


def look(*arguments, code=0):
    """Run a command that only looks, in this process."""
    result = CliRunner().invoke(main, arguments)
    assert result.exit_code == code, result.output
    return result


def problem(result, code):
    """The one error on stderr of a command that failed; it comes last, shows no password and no traceback."""
    returned = result.returncode if isinstance(result, subprocess.CompletedProcess) else result.exit_code
    assert returned == code, result.stderr
    assert result.stdout == ""
    assert "Traceback" not in result.stderr
    assert SECRET not in result.stderr
    before, found, text = result.stderr.partition("Error: ")
    assert found, result.stderr
    assert "Error: " not in text
    assert not before or before.endswith("\n")
    return text.rstrip("\n")


def run_problem(code, *, database_url="sqlite://", broker_url=AWAY, arguments=()):
    result = relay("run", "--database-url", database_url, "--broker-url", broker_url, *arguments)
    return problem(result, code)


def one_line(text):
    assert "\n" not in text, text
    return text


def with_url(url, **parts):
    split = urlsplit(url)
    where = f"{split.hostname}:{parts.get('port', split.port)}"
    password = parts.get("password", split.password)
    return urlunsplit(split._replace(netloc=f"{split.username}:{password}@{where}", path=parts.get("path", split.path)))


@pytest.fixture
def local(tmp_path):
    """The URL of a database with the tables that needs no server."""
    sqlite_database(tmp_path).dispose()
    return f"sqlite:///{tmp_path / 'outbox.db'}"


def execute(engine, statement):
    with engine.begin() as connection:
        connection.execute(sa.text(statement))


# The database


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("", "the database URL cannot be read; expected postgresql+psycopg://user:password@host:5432/name"),
        ("shop", "the database URL cannot be read"),
        (f"postgresql://app:{SECRET}@host:port/shop", "the database URL cannot be read"),
        (f"mysql://app:{SECRET}@host/shop", "database 'mysql' is not supported; use one of: postgresql, sqlite"),
        (
            f"postgresql+nope://app:{SECRET}@host/shop",
            "driver 'postgresql+nope' is unknown or not installed; use postgresql+psycopg",
        ),
        (f"postgresql+pg8000://app:{SECRET}@host/shop", "driver 'postgresql+pg8000' is unknown or not installed"),
        (f"postgresql+psycopg_async://app:{SECRET}@host/shop", "is for asyncio, which this process does not use"),
        ("sqlite+aiosqlite:///x.db", "is for asyncio, which this process does not use; use sqlite:///"),
    ],
)
def test_a_database_url_that_cannot_work_is_a_usage_error(url, says):
    for arguments in (("status",), ("messages", "list"), ("run", "--broker-url", AWAY)):
        text = problem(look(*arguments, "--database-url", url, code=USAGE), USAGE)
        assert says in one_line(text)


def test_a_wrong_database_password_is_told_apart(engine, database_url):
    url = with_url(database_url, password=SECRET)

    assert "database: " in one_line(run_problem(DATABASE, database_url=url))
    assert "password authentication failed" in problem(look("status", "--database-url", url, code=DATABASE), DATABASE)


def test_a_missing_database_is_named(database_url):
    text = run_problem(DATABASE, database_url=with_url(database_url, path="/absent"))

    assert 'database "absent" does not exist' in one_line(text)


@pytest.mark.parametrize("arguments", [("status",), ("messages", "list"), ("messages", "show", str(uuid4()))])
def test_a_database_that_is_down_is_told_apart(arguments):
    url = f"postgresql://app:{SECRET}@127.0.0.1:{free_port()}/shop"

    assert "Connection refused" in one_line(problem(look(*arguments, "--database-url", url, code=DATABASE), DATABASE))


def test_a_relay_does_not_start_while_the_database_is_down():
    url = f"postgresql://app:{SECRET}@127.0.0.1:{free_port()}/shop"

    assert "Connection refused" in one_line(run_problem(DATABASE, database_url=url))


def test_an_option_that_the_driver_does_not_know_is_no_question_of_tables(database_url):
    url = database_url + "?nonsense=1"
    text = problem(look("status", "--database-url", url, code=DATABASE), DATABASE)

    assert 'invalid connection option "nonsense"' in one_line(text)


def test_a_file_that_is_no_database_is_said(tmp_path):
    (tmp_path / "x.db").write_text("not a database, but long enough to be read as one" * 10)

    assert "not a database" in problem(
        look("status", "--database-url", f"sqlite:///{tmp_path / 'x.db'}", code=DATABASE), DATABASE
    )


def test_a_folder_that_is_not_there_is_said(tmp_path):
    url = f"sqlite:///{tmp_path / 'absent' / 'x.db'}"

    assert "unable to open database file" in one_line(problem(look("status", "--database-url", url, code=DATABASE), DATABASE))


# The tables


def test_without_tables_the_relay_says_which_revision_to_paste(database_url):
    text = run_problem(SCHEMA, database_url=database_url)

    assert "outbox_message: the table is missing" in text
    assert "migrations.upgrade(op, version=1" in text
    assert "outbox-relay schema upgrade" in text


@pytest.mark.parametrize("arguments", [("status",), ("messages", "list"), ("messages", "show", str(uuid4()))])
def test_without_tables_the_others_say_what_to_run(database_url, tmp_path, arguments):
    for url in (database_url, f"sqlite:///{tmp_path / 'empty.db'}"):
        text = problem(look(*arguments, "--database-url", url, code=SCHEMA), SCHEMA)
        assert "run: outbox-relay schema verify" in one_line(text)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ("ALTER TABLE outbox_message DROP COLUMN last_error CASCADE", "outbox_message: column last_error is missing"),
        ("DROP INDEX outbox_message_pending_ix", "outbox_message: index outbox_message_pending_ix is missing"),
        ("DELETE FROM outbox_partition WHERE partition = 7", "outbox_partition: no row for partition 7"),
        ("DROP TABLE processed_messages", "processed_messages: the table is missing"),
    ],
)
def test_tables_that_were_changed_stop_the_relay_before_it_claims(engine, database_url, change, says):
    execute(engine, change)

    assert says in run_problem(SCHEMA, database_url=database_url)


def test_a_dropped_column_is_told_apart_from_a_database_that_is_down(engine, database_url):
    execute(engine, "ALTER TABLE outbox_message DROP COLUMN state CASCADE")
    assert "schema verify" in problem(look("messages", "list", "--database-url", database_url, code=SCHEMA), SCHEMA)


def test_tables_in_a_schema_that_is_not_there_are_missing(engine, database_url):
    assert "app.outbox_message: the table is missing" in run_problem(
        SCHEMA, database_url=database_url, arguments=["--schema", "app"]
    )
    assert "app.outbox" in problem(look("status", "--database-url", database_url, "--schema", "app", code=SCHEMA), SCHEMA)


# The broker


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("rabbit", "the broker URL cannot be read; expected amqp://user:password@host:5672/vhost"),
        (f"http://a:{SECRET}@host", "the broker URL cannot be read"),
        (f"amqp://a:{SECRET}@host:port//", "the broker URL cannot be read"),
        ("kafka://host", "does not tell whether a message has arrived"),
    ],
)
def test_a_broker_url_that_cannot_work_is_a_usage_error(local, url, says):
    assert says in one_line(run_problem(USAGE, database_url=local, broker_url=url))


def test_a_broker_that_says_no_ends_the_relay_with_its_words(local, vhost_url):
    wrong_password = with_url(vhost_url, password=SECRET)
    assert "403 " in one_line(run_problem(BROKER, database_url=local, broker_url=wrong_password))

    text = run_problem(BROKER, database_url=local, broker_url=with_url(vhost_url, path="/absent"))
    assert "530 NOT_ALLOWED" in one_line(text)
    assert "absent" in text


def test_an_exchange_of_another_type_ends_the_relay(local, vhost_url):
    vhost = kombu.Connection(vhost_url).virtual_host
    with amqp.Connection(f"127.0.0.1:{urlsplit(vhost_url).port}", virtual_host=vhost) as connection:
        connection.channel().exchange_declare("outbox", "fanout", durable=True, auto_delete=False)
    text = run_problem(BROKER, database_url=local, broker_url=vhost_url)

    assert "406 PRECONDITION_FAILED" in one_line(text)
    assert "'outbox'" in text


@contextmanager
def running(*arguments):
    """A relay in a process of its own; ended for good afterwards."""
    with subprocess.Popen(command("run", *arguments), env=environment(), stderr=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


def read_until(process, text):
    """Read stderr up to the line with this text; return what was read."""
    lines = []
    for line in process.stderr:
        lines.append(line)
        if text in line:
            return lines
    raise AssertionError("".join(lines))


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_relay_whose_broker_is_away_goes_on_and_stops_when_asked(local, number):
    with running("--database-url", local, "--broker-url", AWAY.replace("guest:guest", f"guest:{SECRET}")) as process:
        lines = read_until(process, "server away, trying again")
        assert "server=broker" in lines[-1]
        assert "Connection refused" in lines[-1]
        process.send_signal(number)
        lines += process.stderr.readlines()
        assert process.wait(30) == 0

    assert "relay stopped" in lines[-1]
    assert SECRET not in "".join(lines)
    assert "Traceback" not in "".join(lines)


def test_a_relay_publishes_and_stops_with_nothing_leased(engine, database_url, vhost_url, tmp_path):
    config = tmp_path / "relay.toml"
    config.write_text('[[routes]]\ntopics = "#"\nexchange = "shop"\nqueues = ["all"]\n')
    (message_id,) = insert(engine, "a")
    with running("--database-url", database_url, "--broker-url", vhost_url, "--config", str(config)) as process:
        until(lambda: totals(database_url)["published"] == 1)
        process.terminate()
        assert process.wait(30) == 0

    with kombu.Connection(vhost_url) as connection:
        message = kombu.Queue("all", channel=connection.channel()).get()
    assert message.properties["message_id"] == str(message_id)
    status = totals(database_url)
    assert (status["leases"], status["published"], sum(status["messages"].values())) == ([], 1, 0)


def totals(database_url):
    return json.loads(look("status", "--database-url", database_url, "--json").stdout)


# Options


def test_an_unknown_option_in_the_file_is_named(local, tmp_path):
    config = tmp_path / "relay.toml"
    config.write_text("leese = 30\n")
    text = run_problem(USAGE, database_url=local, arguments=["--config", str(config)])

    assert "relay.toml: unknown option leese; known are: " in one_line(text)


def test_a_lease_shorter_than_the_wait_for_confirms_is_refused(local):
    text = run_problem(USAGE, database_url=local, arguments=["--lease", "10s", "--confirm-timeout", "9s"])

    assert "10 s < 9 s + 5 s" in one_line(text)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("run", "--lease", "soon"), "'soon' is not a time; write e.g. 500ms, 30s"),
        (("run", "--batch-size", "0"), "0 is not in the range"),
        (("run", "--nonsense"), "No such option"),
        (("status",), "Missing option '--database-url'"),
        (("messages", "show", "--database-url", "sqlite://"), "Missing argument 'MESSAGE_ID'"),
        (("messages", "show", "--database-url", "sqlite://", "17"), "is not a valid UUID"),
        (("messages", "list", "--state", "gone"), "'gone' is not one of"),
        (("messages", "list", "--after", "99999999999999999999"), "is not in the range"),
        (("nonsense",), "No such command 'nonsense'"),
    ],
)
def test_a_wrong_argument_is_a_usage_error(arguments, says):
    assert says in one_line(problem(look(*arguments, code=USAGE), USAGE))


def commands(group=main, path=()):
    """Every command that can be run, by the words that call it."""
    for name, found in group.commands.items():
        if isinstance(found, click.Group):
            yield from commands(found, (*path, name))
        else:
            yield (*path, name), found


@pytest.mark.parametrize(
    ("path", "found"), list(commands()), ids=lambda value: " ".join(value) if isinstance(value, tuple) else ""
)
def test_the_help_of_a_command_names_every_environment_variable(path, found):
    shown = " ".join(look(*path, "--help").stdout.split())  # lines are broken anywhere
    variables = [option.envvar for option in found.params if getattr(option, "envvar", None)]

    assert all(f"env var: {variable}" in shown for variable in variables)
    if any("--database-url" in option.opts for option in found.params):
        assert "OUTBOX_DATABASE_URL" in variables
    if path == ("run",):
        assert {"OUTBOX_BROKER_URL", "OUTBOX_CONFIG", "OUTBOX_LEASE", "OUTBOX_LOG_LEVEL", "OUTBOX_SCHEMA"} <= set(variables)


def test_every_option_of_run_can_be_given_by_the_environment_and_has_a_text():
    found = dict(commands())[("run",)]
    for option in found.params:
        assert option.envvar == "OUTBOX_" + option.opts[0].removeprefix("--").replace("-", "_").upper()
        assert option.help


# Looking


@pytest.fixture
def filled(engine):
    """One message in every state, oldest 100 seconds overdue, and two leases of one relay that has published."""
    ago = datetime.now(UTC) - timedelta(seconds=100)
    with engine.begin() as connection:
        ids = {
            "pending": insert(connection, "a", created_at=ago, available_at=ago, topic="orders.placed"),
            "blocked": insert(connection, "b", "b", state=State.BLOCKED),
            "dead": insert(connection, "b", state=State.DEAD, dead_at=ago, last_error="unroutable", attempts=20, created_at=ago),
            "scheduled": insert(
                connection, None, state=State.SCHEDULED, available_at=ago + timedelta(days=9), topic="bills.sent"
            ),
            "sent": insert(connection, None, state=State.SENT, sent_at=ago),
        }
        connection.execute(partition.update().where(partition.c.partition < 3).values(published=5, failed=2))
    Transactions(engine, DEFAULT, owner="host:1:abc", lease_s=30, batch_size=10, policies=Policies()).claim()
    return ids


def test_status_as_json_counts_what_stands_where(filled, database_url):
    found = json.loads(look("status", "--database-url", database_url, "--json").stdout)

    assert found["messages"] == {"scheduled": 1, "pending": 1, "blocked": 2, "sent": 1, "dead": 1}
    assert 100 <= found["oldest_unsent_s"] < 160
    assert (found["published"], found["failed"]) == (15, 6)
    (lease,) = found["leases"]
    assert lease["owner"] == "host:1:abc"
    assert len(lease["partitions"]) == 1
    assert 0 < lease["expires_in_s"] <= 30


def test_status_as_text_says_the_same(filled, database_url):
    lines = look("status", "--database-url", database_url).stdout.splitlines()

    assert lines[0] == "messages       scheduled 1  pending 1  blocked 2  sent 1  dead 1"
    assert lines[1].startswith("oldest unsent  10")
    assert lines[2] == "totals         published 15  failed tries 6"
    assert lines[3] == "partitions     1 of 64 leased"
    assert lines[4].startswith("  host:1:abc  partitions ")
    assert lines[5:] == ["relays         0 at work", "paused         nothing"]


def test_status_of_an_empty_outbox_has_no_oldest(local):
    found = json.loads(look("status", "--database-url", local, "--json").stdout)

    assert found == {
        "messages": {"scheduled": 0, "pending": 0, "blocked": 0, "sent": 0, "dead": 0},
        "counted_up_to": 10_000,
        "oldest_unsent_s": None,
        "leases": [],
        "published": 0,
        "failed": 0,
        "relays": [],
        "paused": [],
    }
    assert "oldest unsent  none" in look("status", "--database-url", local).stdout


def test_a_message_that_the_application_delayed_is_not_overdue(engine, database_url):
    future = datetime.now(UTC) + timedelta(days=1)
    insert(engine, "a", state=State.SCHEDULED, available_at=future, created_at=future - timedelta(days=9))
    assert json.loads(look("status", "--database-url", database_url, "--json").stdout)["oldest_unsent_s"] is None

    insert(
        engine, "b", state=State.SCHEDULED, available_at=future, created_at=future - timedelta(days=9), last_error="unroutable"
    )
    assert json.loads(look("status", "--database-url", database_url, "--json").stdout)["oldest_unsent_s"] > 7 * 86_400


def listed(database_url, *arguments):
    output = look("messages", "list", "--database-url", database_url, *arguments, "--json").stdout
    return [json.loads(line) for line in output.splitlines()]


def test_messages_are_listed_as_json_in_id_order(filled, database_url):
    found = listed(database_url)

    assert [row["id"] for row in found] == sorted(row["id"] for row in found)
    dead = next(row for row in found if row["state"] == "dead")
    assert dead["message_id"] == str(filled["dead"][0])
    assert (dead["key"], dead["attempts"], dead["last_error"]) == ("b", 20, "unroutable")
    assert datetime.fromisoformat(dead["created_at"]).tzinfo is not None
    assert "payload" not in dead


def test_messages_are_filtered_and_paged(filled, database_url):
    assert [row["state"] for row in listed(database_url, "--state", "blocked")] == ["blocked"] * 2
    assert [row["state"] for row in listed(database_url, "--topic", "bills.sent")] == ["scheduled"]
    assert [row["state"] for row in listed(database_url, "--key", "b")] == ["blocked", "blocked", "dead"]
    everything = [row["id"] for row in listed(database_url)]
    first = [row["id"] for row in listed(database_url, "--limit", "4")]
    assert first + [row["id"] for row in listed(database_url, "--limit", "4", "--after", str(first[-1]))] == everything


def test_messages_are_listed_as_text_one_on_each_line(filled, database_url):
    result = look("messages", "list", "--database-url", database_url, "--state", "dead")

    (line,) = result.stdout.splitlines()
    assert str(filled["dead"][0]) in line
    assert "dead" in line
    assert line.endswith("orders.placed  key b  attempts 20  unroutable")


def test_an_error_of_many_lines_stays_on_the_line_of_its_message(engine, database_url):
    insert(engine, "a", state=State.DEAD, dead_at=datetime.now(UTC), last_error="first\nsecond\x1b[31m")
    (line,) = look("messages", "list", "--database-url", database_url).stdout.splitlines()

    assert "first\\nsecond\\x1b[31m" in line


def test_no_messages_is_said_on_stderr_and_is_no_failure(local):
    result = look("messages", "list", "--database-url", local)
    assert (result.stdout, result.stderr) == ("", "no messages\n")

    result = look("messages", "list", "--database-url", local, "--json")
    assert (result.stdout, result.stderr) == ("", "")


@pytest.mark.parametrize(("payload", "shown"), [('{"n": "č"}'.encode(), '{"n": "č"}'), (b"\xff\x00", "base64:/wA=")])
def test_one_message_is_shown_with_its_payload(engine, database_url, payload, shown):
    (message_id,) = insert(engine, "o-1", payload=payload, headers={"trace": "x"})
    found = json.loads(look("messages", "show", "--database-url", database_url, str(message_id), "--json").stdout)

    assert (found["message_id"], found["key"], found["payload"]) == (str(message_id), "o-1", shown)
    assert (found["headers"], found["state"], found["last_error"]) == ({"trace": "x"}, "pending", None)
    text = look("messages", "show", "--database-url", database_url, str(message_id)).stdout
    assert f"payload         {shown}\n" in text
    assert 'headers         {"trace": "x"}\n' in text
    assert set(found) == {line.partition(" ")[0] for line in text.splitlines()}


def test_an_unknown_message_is_a_failure_that_says_what_it_may_mean(local):
    message_id = str(uuid4())
    text = problem(look("messages", "show", "--database-url", local, message_id, code=FAILURE), FAILURE)

    assert one_line(text) == f"no message {message_id}: it was never committed, or it has been published and deleted"
