"""The README of examples/encryption, typed into three terminals; what is on its way is looked for in the tables and the queue."""

import base64
import importlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any
from uuid import uuid4

import pytest
import sqlalchemy as sa

from outbox import Message
from outbox.inbox import Permanent
from tests.integration.test_rabbitmq_publisher import client
from tests.readme import blocks, with_urls
from tests.story import ROOT
from tests.terminal import Terminal, assert_shows, eventually

README = (ROOT / "examples/encryption/README.md").read_text(encoding="utf-8")
SETTINGS, FINDING, ANOTHER_KEY, RELAY, WARD, REPORT, REPORT_PRINTS = blocks(README)
SECRETS = ("no pathogens", "see letter", "text")


class Clinic:
    """Someone who types blocks of the README, with the URLs of our servers and a file for the keys."""

    def __init__(self, folder: Path, database_url: str, broker_url: str) -> None:
        self.folder, self.keys, self.broker_url = folder, folder / "keys", broker_url
        self._database_url = database_url
        self.engine = sa.create_engine(database_url, poolclass=sa.NullPool)
        self.terminal = Terminal(ROOT, {})

    def typed(self, commands: Sequence[str]) -> list[str]:
        lines = [with_urls(line, self._database_url, self.broker_url) for line in SETTINGS.commands]
        return [*lines, f"export CLINIC_KEYS={self.keys}", *commands]

    def runs(self, commands: Sequence[str]) -> str:
        return self.terminal.run(self.typed(commands))

    def relay(self) -> Any:
        return self.terminal.start(self.typed(RELAY.commands), self.folder / "relay.log")

    def ward(self) -> Any:
        return self.terminal.start(self.typed(WARD.commands), self.folder / "ward.log")

    def rows(self, table: str) -> list[str]:
        """The rows of a table as text, bytes as they are."""
        with self.engine.connect() as connection:
            found = connection.execute(sa.text(f"SELECT * FROM {table} ORDER BY id")).mappings().all()
        return [
            " ".join(each.decode("latin-1") if isinstance(each, bytes) else str(each) for each in row.values()) for row in found
        ]

    def queued(self) -> list[Any]:
        """What lies in the queue, which keeps it."""
        with client(self.broker_url) as channel:
            found = list(iter(lambda: channel.basic_get("ward"), None))
            for message in found:
                channel.basic_reject(message.delivery_tag, requeue=True)
        return found


@pytest.fixture
def clinic(tmp_path: Path, database_url: str, vhost_url: str) -> Clinic:
    return Clinic(tmp_path, database_url, vhost_url)


def test_what_was_sealed_before_and_after_another_key_is_read_and_nobody_sees_it_on_its_way(clinic: Clinic) -> None:
    clinic.runs([*FINDING.commands, *ANOTHER_KEY.commands])
    rows = clinic.rows("outbox_message")
    assert len(rows) == 2
    assert not any(secret in row for row in rows for secret in SECRETS)
    with clinic.relay() as relay:
        eventually(lambda: assert_count(clinic.rows("outbox_message"), 0))
        queued = clinic.queued()
        assert len(queued) == 2
        assert [each.headers["sealed-with"] for each in queued] == ["k1", "k2"]
        for each in queued:
            assert not any(secret.encode() in each.body for secret in SECRETS)
            assert not any(secret in str(each.properties) for secret in SECRETS)
        with clinic.ward() as ward:
            eventually(lambda: assert_shows(clinic.runs(REPORT.commands), REPORT_PRINTS.text))
            ward.stop()
        relay.stop()


def assert_count(found: Sequence[object], count: int) -> None:
    assert len(found) == count


def test_one_without_its_key_waits_until_the_key_is_there_and_is_kept_sealed(clinic: Clinic) -> None:
    clinic.runs(FINDING.commands)
    kept = clinic.keys.read_text()
    clinic.runs([f"python -m clinic.keys other > {clinic.keys}"])
    with clinic.relay() as relay, clinic.ward() as ward:
        eventually(lambda: assert_count(clinic.rows("failed_messages"), 1))
        (row,) = clinic.rows("failed_messages")
        assert "KeyError" in row
        assert not any(secret in row for secret in SECRETS[:2])
        clinic.keys.write_text(clinic.keys.read_text() + kept)
        eventually(lambda: assert_shows(clinic.runs(REPORT.commands), "S-1  read with k1  18 characters"))
        ward.stop()
        relay.stop()


@pytest.fixture
def sealed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> ModuleType:
    """The module of the example, with one key."""
    monkeypatch.syspath_prepend(str(ROOT / "examples/encryption"))
    keys = tmp_path / "keys"
    keys.write_text(f"k1 {base64.b64encode(bytes(range(32))).decode()}\n")
    monkeypatch.setenv("CLINIC_KEYS", str(keys))
    return importlib.import_module("clinic.sealed")


def flipped(message: Message) -> Message:
    return replace(message, payload=message.payload[:-1] + bytes([message.payload[-1] ^ 1]))


def of_another_message(message: Message) -> Message:
    return replace(message, message_id=str(uuid4()))


def of_another_topic(message: Message) -> Message:
    return replace(message, topic="findings.withdrawn")


@pytest.mark.parametrize("change", [flipped, of_another_message, of_another_topic])
def test_what_was_changed_on_its_way_is_found_out(sealed: ModuleType, change: Callable[[Message], Message]) -> None:
    event = sealed.sealed("findings.ready", {"text": "ž"})
    message = Message(
        message_id=str(event.message_id), topic=event.topic, payload=event.payload, headers=dict(event.headers or {})
    )
    assert sealed.opened(message) == {"text": "ž"}
    with pytest.raises(Permanent, match="It was sealed with another key"):
        sealed.opened(change(message))
