"""Log lines are one line each, with the extra keys at the end."""

import logging
import re
from collections.abc import Iterator

import pytest

from outbox.cli import logs


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
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
