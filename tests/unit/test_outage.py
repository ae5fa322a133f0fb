"""A server that is away: pauses that grow, and few words."""

import logging
from types import SimpleNamespace

import pytest
from sqlalchemy.exc import OperationalError

from outbox.backoff import Backoff
from outbox.outage import Outage

LOG = logging.getLogger("outbox.relay")
ERROR = ConnectionRefusedError("nobody listens")


@pytest.fixture
def time(monkeypatch):
    time = SimpleNamespace(now=1000.0)
    monkeypatch.setattr("outbox.outage.time", SimpleNamespace(monotonic=lambda: time.now))
    return time


@pytest.fixture
def log(caplog):
    caplog.set_level(logging.INFO, "outbox.relay")
    return caplog


def messages(log):
    return [record.getMessage() for record in log.records]


def test_the_first_failure_is_said_at_once_with_its_reason(time, log):
    Outage(LOG, "broker").pause_s(ERROR)

    (record,) = log.records
    assert (record.levelname, record.getMessage()) == ("WARNING", "server away, trying again")
    assert (record.server, record.tries, record.error) == ("broker", 1, "nobody listens")


def test_an_outage_of_an_hour_is_said_every_thirty_seconds(time, log):
    outage = Outage(LOG, "broker")
    for _ in range(3600):
        outage.pause_s(ERROR)
        time.now += 1

    assert len(log.records) == 120


def test_a_server_that_comes_and_goes_is_not_said_more_often(time, log):
    outage = Outage(LOG, "broker")
    for _ in range(600):
        outage.pause_s(ERROR)
        time.now += 0.05
        outage.over()
        time.now += 0.05

    assert messages(log).count("server away, trying again") == 2
    assert messages(log).count("server back") == 2


def test_the_end_of_an_outage_is_said_with_its_length(time, log):
    outage = Outage(LOG, "broker")
    outage.pause_s(ERROR)
    time.now += 90
    outage.pause_s(ERROR)
    time.now += 0.5
    outage.over()
    outage.over()

    assert messages(log) == ["server away, trying again"] * 2 + ["server back"]
    assert (log.records[-1].tries, log.records[-1].away_s) == (2, 90.5)


def test_an_outage_long_after_the_last_is_said_at_once(time, log):
    outage = Outage(LOG, "broker")
    outage.pause_s(ERROR)
    outage.over()
    time.now += 31
    outage.pause_s(ERROR)

    assert messages(log)[-1] == "server away, trying again"


def test_a_server_that_was_never_away_is_not_spoken_of(time, log):
    Outage(LOG, "broker").over()

    assert log.records == []


def test_pauses_grow_from_a_tenth_of_a_second_to_five_with_jitter(time):
    outage = Outage(LOG, "broker")
    pauses = [outage.pause_s(ERROR) for _ in range(200)]

    assert 0.05 <= pauses[0] <= 0.1
    assert 0.1 <= pauses[1] <= 0.2
    assert all(2.5 <= pause <= 5 for pause in pauses[6:])
    assert len(set(pauses)) > 100


def test_pauses_begin_anew_after_the_server_was_back(time):
    outage = Outage(LOG, "broker", Backoff(first_s=1, ceiling_s=64, floor=1))

    assert [outage.pause_s(ERROR) for _ in range(3)] == [1, 2, 4]
    outage.over()
    assert outage.pause_s(ERROR) == 1


def test_the_reason_is_the_first_line_of_what_the_server_said_without_the_statement(time, log):
    error = OperationalError("SELECT secret_column", {"password": "geheim"}, Exception("connection lost\nDETAIL: more"))
    Outage(LOG, "database").pause_s(error)

    assert log.records[0].error == "connection lost"
