"""A process is killed, stopped past its lease, or asked to end, at each point between two steps; the books must balance."""

import signal
from enum import StrEnum

import pytest

from outbox.points import Point
from outbox.store.dialects import limit_statements
from outbox.store.engine import open_engine
from tests.faults.cell import MOST_IN_BATCH, Cell, until
from tests.faults.processes import Program
from tests.faults.stopped import stopping_at, wait_until_stopped, wake
from tests.servers.rabbitmq import RabbitMQ

pytestmark = pytest.mark.timeout(150)


class Fault(StrEnum):
    """What happens to the process at the point."""

    KILL = "killed"
    PAUSE = "paused past its lease"
    TERM = "asked to end"


# How many messages a relay may have published by then that are not recorded as sent.
IN_DOUBT = {
    Point.AFTER_CLAIM: 0,
    Point.HALF_SENT: MOST_IN_BATCH // 2,
    Point.BEFORE_SETTLE: MOST_IN_BATCH,
    Point.DURING_SETTLE: MOST_IN_BATCH,
    Point.DURING_PROMOTION: 0,
    Point.DURING_CLEANUP: 0,
}
KEEP_SENT = ("--retention", "1s")
LOCK_WAITS = "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND wait_event = 'transactionid'"
QUICK = {
    (Point.HALF_SENT, Fault.PAUSE),
    (Point.BEFORE_SETTLE, Fault.KILL),
    (Point.DURING_SETTLE, Fault.TERM),
    (Point.BEFORE_ACK, Fault.KILL),
}


def cells(*points: Point) -> list[object]:
    return [
        pytest.param(point, fault, id=f"{fault}-{point}", marks=() if (point, fault) in QUICK else pytest.mark.matrix)
        for point in points
        for fault in Fault
    ]


@pytest.mark.parametrize(("point", "fault"), cells(*IN_DOUBT))
def test_a_relay_at_a_point(point: Point, fault: Fault, database_url: str, vhost_url: str) -> None:
    cell = Cell(database_url, vhost_url)
    cell.write(300)
    if point is Point.DURING_PROMOTION:
        _let_some_back_off(cell)
    cell.listen()
    if point is Point.DURING_CLEANUP:
        _publish_and_keep(cell)
    nth = 1 if point in {Point.DURING_PROMOTION, Point.DURING_CLEANUP} else 2
    keep = KEEP_SENT if point is Point.DURING_CLEANUP else ()
    with cell.consumer("consumer") as consumer, stopping_at(point, nth, cell.relay("stopped relay", *keep)) as stopped:
        wait_until_stopped(stopped)
        with cell.relay("other relay", *keep) as other, cell.relay("replacement", *keep) as replacement:
            with cell.writing(200):
                survivors = [consumer, other, replacement]
                _strike(fault, cell, stopped, survivors)
            if fault is Fault.PAUSE:
                survivors.append(stopped)
            cell.until_done(survivors)
            for program in survivors:
                assert program.wait_until_ready().terminate() == 0, program.log
    cell.judge(most_extra=0 if fault is Fault.TERM else IN_DOUBT[point])


def _let_some_back_off(cell: Cell) -> None:
    """Let a relay find no queue for the first message of every key, and end."""
    with cell.relay("early relay", "--retry-first", "500ms", "--retry-ceiling", "500ms") as relay:
        until(lambda: cell.scalar("SELECT count(*) FROM outbox_message WHERE state IN ('scheduled', 'blocked')") > 200, [relay])
        assert relay.terminate() == 0


def _publish_and_keep(cell: Cell) -> None:
    """Let a relay publish what there is, and keep it until it is older than a second."""
    with cell.relay("early relay", *KEEP_SENT) as relay:
        until(lambda: cell.left() == 0, [relay])
        assert relay.terminate() == 0
    until(lambda: cell.scalar("SELECT count(*) FROM outbox_message WHERE sent_at > now() - interval '1 s'") == 0)
    cell.write(100)


def _strike(fault: Fault, cell: Cell, stopped: Program, others: list[Program]) -> None:
    match fault:
        case Fault.KILL:
            stopped.kill()
        case Fault.PAUSE:
            last = cell.last_id()
            until(lambda: cell.left(up_to=last) == 0, others)
            wake(stopped)
        case Fault.TERM:
            stopped.process.send_signal(signal.SIGTERM)
            wake(stopped)
            assert stopped.process.wait(30) == 0, stopped.log


@pytest.mark.parametrize(("point", "fault"), cells(Point.BEFORE_COMMIT, Point.BEFORE_ACK))
def test_a_consumer_at_a_point(point: Point, fault: Fault, database_url: str, vhost_url: str, rabbitmq: RabbitMQ) -> None:
    cell = Cell(database_url, vhost_url)
    cell.write(100)
    cell.listen()
    stopped = stopping_at(point, 20, cell.consumer("stopped consumer"))
    with cell.relay("relay 1") as one, cell.relay("relay 2") as two, stopped:
        with cell.writing(100):
            wait_until_stopped(stopped)
        if fault is Fault.PAUSE:
            until(lambda: cell.left() == 0, [one, two])
            # What the broker does by itself when heartbeats stay away for a minute.
            rabbitmq.ctl("close_all_connections", "--vhost", vhost_url.rpartition("/")[2], "no heartbeat")
        elif fault is Fault.KILL:
            stopped.kill()
        else:
            stopped.process.send_signal(signal.SIGTERM)
            wake(stopped)
            assert stopped.process.wait(30) == 0, stopped.log
        with cell.consumer("other consumer") as other:
            survivors = [one, two, other]
            if fault is Fault.PAUSE:
                _until_taken_over(point, cell, other)
                wake(stopped)
                survivors.append(stopped)
            cell.until_done(survivors)
            for program in survivors:
                assert program.wait_until_ready().terminate() == 0, program.log
    cell.judge()


def _until_taken_over(point: Point, cell: Cell, other: Program) -> None:
    if point is Point.BEFORE_ACK:
        cell.until_done([other])
    else:  # it has the same message, and waits for the open transaction of the paused one
        until(lambda: cell.scalar(LOCK_WAITS) > 0, [other])


def test_a_transaction_of_ours_does_not_outlive_a_pause(database_url: str) -> None:
    names = ("idle_in_transaction_session_timeout", "statement_timeout")
    engine = open_engine(database_url)
    with engine.begin() as connection:
        before = [connection.exec_driver_sql(f"SHOW {name}").scalar_one() for name in names]
    with engine.begin() as connection:
        limit_statements(connection, 7)
        assert [connection.exec_driver_sql(f"SHOW {name}").scalar_one() for name in names] == ["10s", "7s"]
    with engine.begin() as connection:
        assert [connection.exec_driver_sql(f"SHOW {name}").scalar_one() for name in names] == before
    engine.dispose()
