"""Log lines are one line each, with the extra keys at the end, or one JSON object each; none has a secret in it."""

import json
import logging
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from datetime import date
from pathlib import Path
from typing import Any

import kombu
import pytest
import sqlalchemy as sa

from outbox import Message
from outbox.cli import logs
from outbox.cli.redaction import redact
from outbox.errors import ConfigurationError
from outbox.mention import mentioned, trace_id_of


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    hooks = sys.excepthook, threading.excepthook
    yield
    sys.excepthook, threading.excepthook = hooks
    root.handlers[:] = handlers
    root.setLevel(level)
    for library in ("amqp", "kombu", "asyncio"):
        logging.getLogger(library).setLevel(logging.NOTSET)


def test_line(capsys: pytest.CaptureFixture[str]) -> None:
    logs.setup("info")
    logging.getLogger("outbox.inbox").info("handled %s", "it", extra={"message_id": "m-1", "error": "two\nlines", "empty": ""})
    line = capsys.readouterr().err
    assert re.fullmatch(
        r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z INFO outbox\.inbox handled it message_id=m-1 error='two\\nlines' empty=''\n",
        line,
    )


def test_traceback_follows(capsys: pytest.CaptureFixture[str]) -> None:
    logs.setup("info")
    logging.getLogger("outbox").error("failed", exc_info=KeyError("mine"))
    lines = capsys.readouterr().err.splitlines()
    assert lines[0].endswith("ERROR outbox failed")
    assert lines[-1] == "KeyError: 'mine'"


def test_level(capsys: pytest.CaptureFixture[str]) -> None:
    logs.setup("debug")
    logging.getLogger("outbox").debug("ours")
    logging.getLogger("amqp").debug("theirs")
    logs.setup("error")
    logging.getLogger("outbox").warning("quiet")
    assert [line.split()[-1] for line in capsys.readouterr().err.splitlines()] == ["ours"]


def last_json(capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    (line,) = capsys.readouterr().err.splitlines()
    found: dict[str, Any] = json.loads(line)
    return found


def test_json_is_one_object_a_line_with_the_keys_that_are_documented(capsys: pytest.CaptureFixture[str]) -> None:
    logs.setup("info", form="json")
    extra = {
        "attempts": 3,
        "ratio": 0.5,
        "ok": True,
        "none": None,
        "when": date(2026, 1, 2),
        "text": 'a "b"\nc',
        "list": [1, {"a": b"xy"}],
    }
    logging.getLogger("outbox.inbox").warning("handled %s", "it", extra=extra)
    found = last_json(capsys)
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", found.pop("ts"))
    assert found == {
        "level": "warning", "logger": "outbox.inbox", "message": "handled it", "attempts": 3, "ratio": 0.5, "ok": True, "none": None,
        "when": "2026-01-02", "text": 'a "b"\nc', "list": [1, {"a": "2 bytes"}],
    }  # fmt: skip


def test_json_has_a_traceback_as_a_text_and_keeps_its_own_keys(capsys: pytest.CaptureFixture[str]) -> None:
    logs.setup("info", form="json")
    extra = {"ts": "mine", "level": 7, "odd": float("nan"), "half": "\ud800", "none": logging}
    logging.getLogger("outbox").error("failed", exc_info=KeyError("mine"), extra=extra)
    found = last_json(capsys)
    assert found["exception"].splitlines()[-1] == "KeyError: 'mine'"
    assert (found["level"], found["level_"], found["ts_"], found["odd"], found["half"]) == ("error", 7, "mine", "nan", "\ud800")


def test_what_is_logged_while_a_message_is_handled_names_it(capsys: pytest.CaptureFixture[str]) -> None:
    headers = {"traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"}
    logs.setup("info", form="json")
    with mentioned(Message("m-1", "orders.placed", b"{}", headers=headers)):
        logging.getLogger("shop").info("charging")
    found = last_json(capsys)
    assert (found["message_id"], found["topic"], found["trace_id"]) == (
        "m-1",
        "orders.placed",
        "0af7651916cd43dd8448eb211c80319c",
    )
    logging.getLogger("shop").info("idle")
    assert "message_id" not in last_json(capsys)


@pytest.mark.parametrize("given", [None, 7, "", "00-xyz", f"00-{'0' * 32}-b7ad6b7169203331-01", "00-" + "a" * 400])
def test_what_is_no_trace_is_not_shown_as_one(given: object) -> None:
    assert trace_id_of({"traceparent": given}) is None


def test_the_end_by_an_error_is_an_object_too(capsys: pytest.CaptureFixture[str]) -> None:
    logs.last_words(ConfigurationError("wrong"))
    assert capsys.readouterr().err == "Error: wrong\n"
    logs.setup("info", form="json")
    logs.last_words(ConfigurationError("wrong"))
    found = last_json(capsys)
    assert (found["level"], found["error"]) == ("critical", "wrong")


SECRET = "s3cr3t"
TEXTS = [
    f"cannot connect to postgresql+psycopg://app:{SECRET}@db:5432/shop",
    f"amqp://guest:{SECRET}@mq//, amqps://other:{SECRET}@mq2//",
    f"redis://:{SECRET}@host/0",
    f"amqp://user:p@{SECRET}@host//",
    f"amqp://user:p/{SECRET}@host//",
    f"host=db password={SECRET} user=app",
    f"host=db password='two {SECRET} words' user=app",
    f"postgresql://db/shop?user=app&password={SECRET}&sslmode=require",
    f"postgresql://db/shop?sslpassword={SECRET}",
    f"{{'host': 'db', 'password': '{SECRET}'}}",
    f'{{"database_password": "{SECRET}"}}',
    f"OUTBOX_PASSWORD={SECRET}",
]


@pytest.mark.parametrize("form", ["text", "json"])
@pytest.mark.parametrize("text", TEXTS)
def test_no_password_is_logged_wherever_it_stands(capsys: pytest.CaptureFixture[str], text: str, form: str) -> None:
    logs.setup("info", form=form)
    extra = {"error": text, "nested": {"in": [text]}, "db_password": SECRET, "config": {"password": SECRET}}
    logging.getLogger("outbox").error("failed: %s", text, extra=extra, exc_info=ValueError(text))
    said = capsys.readouterr().err
    assert SECRET not in said
    assert "***" in said


@pytest.mark.parametrize(
    "text",
    [
        "http://127.0.0.1:8080/livez",
        "amqp://mq.example:5672//",
        "orders.placed: 3 of 4",
        "Error: password authentication failed for user",
        "a@b.example",
    ],
)
def test_what_is_no_secret_stays(text: str) -> None:
    assert redact(text) == text


def test_errors_of_the_database_and_the_broker_show_neither_passwords_nor_parameters(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    logs.setup("info")
    engine = sa.create_engine(f"sqlite:///{tmp_path}/x.db")
    with pytest.raises(sa.exc.OperationalError) as missing, engine.connect() as connection:
        connection.execute(sa.text("INSERT INTO nothing VALUES (:payload)"), {"payload": f"hidden {SECRET}\nmore"})
    engine.dispose()
    with pytest.raises(sa.exc.ArgumentError) as unreadable:
        sa.make_url(f"//app:{SECRET}@db/shop")
    with pytest.raises(ValueError, match="int") as broker:
        kombu.Connection(f"amqp://guest:{SECRET}@mq:x//").connect()
    for found in (missing, unreadable, broker):
        logging.getLogger("outbox").error("failed", extra={"error": str(found.value)}, exc_info=found.value)
    said = capsys.readouterr().err
    assert SECRET not in said
    assert "INSERT INTO nothing" in said


def test_the_row_that_a_constraint_refused_is_not_shown() -> None:
    text = f'null value in column "a"\nDETAIL:  Failing row contains (1, {SECRET}, {{"card": 4111}}).\n[SQL: INSERT]'
    assert redact(text) == 'null value in column "a"\nDETAIL:  Failing row contains (***).\n[SQL: INSERT]'


def test_what_nobody_caught_is_logged_in_the_same_form_without_secrets() -> None:
    program = f"""
import threading
from outbox.cli import logs
logs.setup("info", form="json")
def fail():
    raise RuntimeError("redis://:{SECRET}@host/0")
thread = threading.Thread(target=fail)
thread.start()
thread.join()
fail()
"""
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    found = [json.loads(line) for line in run.stderr.splitlines()]
    assert run.returncode == 1
    assert [(each["level"], each["message"]) for each in found] == [("critical", "uncaught exception")] * 2
    assert SECRET not in run.stderr
