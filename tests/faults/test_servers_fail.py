"""The broker, the network, the database and the clock fail while there is work; the books must balance."""

import random
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

import pytest
import sqlalchemy as sa
from sqlalchemy.orm import Session

from tests.faults import shop
from tests.faults.cell import MOST_IN_BATCH, Cell, until
from tests.faults.processes import Program
from tests.faults.proxy import Proxy
from tests.faults.shifted import shifted
from tests.faults.standby import Standby
from tests.servers.postgres import Postgres
from tests.servers.rabbitmq import RabbitMQ

pytestmark = pytest.mark.timeout(240)
RETRY_SOON = ("--retry-first", "500ms", "--retry-ceiling", "1s")


@contextmanager
def at_work(cell: Cell, *relays: Program, orders: int = 400) -> Iterator[list[Program]]:
    """Strike in here: in the middle of the work. Afterwards everything must come to its end by itself."""
    programs = [cell.consumer("consumer"), *relays]
    cell.write(100)
    with ExitStack() as stack:
        for program in programs:
            stack.enter_context(program)
        for program in programs:
            program.wait_until_ready()  # one that still starts may give up, as it says
        with cell.writing(orders):
            until(lambda: cell.effects() >= 20, programs)
            yield programs
        cell.until_done(programs, timeout_s=150)
        for program in programs:
            assert program.wait_until_ready().terminate() == 0, program.log


# ------------------------------------------------------------------------------------------------------------ the broker


def restart(broker: RabbitMQ, _cell: Cell) -> None:
    broker.restart()


def kill(broker: RabbitMQ, _cell: Cell) -> None:
    broker.kill()
    broker.start()


def close_connections(broker: RabbitMQ, _cell: Cell) -> None:
    broker.ctl("close_all_connections", "maintenance")


def hang(broker: RabbitMQ, cell: Cell) -> None:
    with broker.suspended():
        until(lambda: cell.left() >= 100)


@pytest.mark.matrix
@pytest.mark.parametrize("strike", [restart, kill, close_connections, hang])
def test_the_broker(strike: Callable[[RabbitMQ, Cell], None], database_url: str, own_rabbitmq: RabbitMQ) -> None:
    cell = Cell(database_url, own_rabbitmq.create_vhost())
    cell.listen()
    with at_work(cell, cell.relay("relay 1"), cell.relay("relay 2")):
        strike(own_rabbitmq, cell)
    cell.judge(most_extra=2 * MOST_IN_BATCH)
    own_rabbitmq.drop_vhost(cell.broker_url)


@pytest.mark.matrix
def test_a_memory_alarm_comes_and_goes(database_url: str, own_rabbitmq: RabbitMQ) -> None:
    cell = Cell(database_url, own_rabbitmq.create_vhost())
    cell.listen()

    def backlogged() -> bool:
        cell.write(20)
        return cell.left() >= 100

    with at_work(cell, cell.relay("relay 1"), cell.relay("relay 2")):
        try:
            own_rabbitmq.ctl("set_vm_memory_high_watermark", "0.00001")
            until(backlogged)  # it takes the broker a second to raise the alarm
        finally:
            own_rabbitmq.ctl("set_vm_memory_high_watermark", "0.4")
    cell.judge()
    own_rabbitmq.drop_vhost(cell.broker_url)


@pytest.mark.matrix
def test_the_exchange_is_deleted(database_url: str, vhost_url: str) -> None:
    cell = Cell(database_url, vhost_url)
    cell.listen()
    with at_work(cell, cell.relay("relay 1", *RETRY_SOON), cell.relay("relay 2", *RETRY_SOON)), cell.broker() as channel:
        # Both queues behind one exchange, so that one binding brings both back: else one could see more than the other.
        channel.exchange_declare("both", "fanout", durable=True, auto_delete=False)
        channel.queue_bind("work", "both")
        channel.queue_bind("observer", "both")
        channel.exchange_delete("outbox")
        until(lambda: cell.scalar("SELECT count(*) FROM outbox_message WHERE last_error LIKE '%unroutable%'") >= 10)
        channel.exchange_bind("both", "outbox", "#")
    cell.judge(most_extra=2 * MOST_IN_BATCH)


@pytest.mark.matrix
def test_a_queue_is_full_and_is_drained_later(database_url: str, vhost_url: str) -> None:
    cell = Cell(database_url, vhost_url)
    cell.listen(**{"x-max-length": 30, "x-overflow": "reject-publish"})
    cell.write(300)
    with cell.relay("relay 1", *RETRY_SOON) as one, cell.relay("relay 2", *RETRY_SOON) as two:
        until(lambda: cell.scalar("SELECT count(*) FROM outbox_message WHERE state = 'scheduled'") >= 20, [one, two])
        with cell.consumer("consumer") as consumer:
            cell.until_done([one, two, consumer])
            for program in (one, two, consumer):
                assert program.wait_until_ready().terminate() == 0, program.log
    cell.judge(most_extra=None)  # the observer's queue takes what the full one refuses, every time


# ----------------------------------------------------------------------------------------------------------- the network


def cut(proxy: Proxy, _cell: Cell) -> None:
    proxy.cut()


def lose_everything(proxy: Proxy, _cell: Cell) -> None:
    before = proxy.connections
    proxy.lose()
    until(lambda: proxy.connections > before)


def lose_everything_while_idle(proxy: Proxy, cell: Cell) -> None:
    until(lambda: cell.left() == 0)
    before = proxy.connections
    proxy.lose()
    cell.write(50)
    until(lambda: proxy.connections > before)


def stall_for_a_moment(proxy: Proxy, cell: Cell) -> None:
    proxy.stall()
    until(lambda: cell.left() >= 50)
    proxy.resume()


def deliver_late(proxy: Proxy, cell: Cell) -> None:
    """What the relay gave up as lost arrives after all, when it has been published again and more behind it."""
    before = proxy.connections
    proxy.stall()
    last = cell.last_id()
    until(lambda: proxy.connections > before and cell.left(up_to=last) == 0)
    proxy.resume()


@pytest.mark.matrix
@pytest.mark.parametrize("strike", [cut, lose_everything, lose_everything_while_idle, stall_for_a_moment, deliver_late])
def test_the_network(strike: Callable[[Proxy, Cell], None], database_url: str, vhost_url: str) -> None:
    cell = Cell(database_url, vhost_url)
    cell.listen()
    with Proxy(vhost_url) as proxy, at_work(cell, cell.relay("relay", broker_url=proxy.url)):
        strike(proxy, cell)
    cell.judge(most_extra=MOST_IN_BATCH)


# ---------------------------------------------------------------------------------------------------------- the database


def stop_and_start(server: Postgres, _url: str) -> None:
    server.restart()


def crash_and_recover(server: Postgres, _url: str) -> None:
    server.stop(mode="immediate")
    server.start()


def terminate_all(server: Postgres, url: str) -> None:
    assert server.terminate_backends(url) > 0


@pytest.mark.matrix
@pytest.mark.parametrize("strike", [stop_and_start, crash_and_recover, terminate_all])
def test_the_database(strike: Callable[[Postgres, str], None], own_postgres: Postgres, vhost_url: str) -> None:
    cell = Cell(own_postgres.create_database(), vhost_url)
    cell.listen()
    with at_work(cell, cell.relay("relay 1"), cell.relay("relay 2")):
        for _ in range(3):
            strike(own_postgres, cell.database_url)
    cell.judge(most_extra=2 * MOST_IN_BATCH)
    own_postgres.drop_database(cell.database_url)


@pytest.mark.matrix
def test_the_database_is_lost_and_its_standby_takes_over(vhost_url: str) -> None:
    with Postgres() as primary, Standby(primary) as standby:
        cell = Cell(standby.either(primary.create_database()), vhost_url)
        cell.listen()
        with at_work(cell, cell.relay("relay 1"), cell.relay("relay 2")):
            primary.kill()
            standby.promote()
        cell.judge(most_extra=2 * MOST_IN_BATCH)


FAIL_FIRST = """
CREATE SEQUENCE {name}_seq;
CREATE FUNCTION {name}() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    IF nextval('{name}_seq') <= {times} THEN
        RAISE EXCEPTION 'injected' USING ERRCODE = '{sqlstate}';
    END IF;
    RETURN NULL;
END $$;
CREATE TRIGGER {name} AFTER {when} FOR EACH STATEMENT EXECUTE FUNCTION {name}();
"""
STATEMENTS = {
    "fail_claim": "UPDATE ON outbox_partition",
    "fail_settle": "DELETE ON outbox_message",
    "fail_inbox": "INSERT ON processed_messages",
}


@pytest.mark.parametrize(
    "sqlstate",
    [
        pytest.param("40001", id="serialization failure", marks=pytest.mark.matrix),
        pytest.param("40P01", id="deadlock", marks=pytest.mark.matrix),
        pytest.param("57014", id="statement timeout", marks=pytest.mark.matrix),
        pytest.param("53100", id="disk full"),
    ],
)
def test_statements_fail_for_a_while(sqlstate: str, database_url: str, vhost_url: str) -> None:
    cell = Cell(database_url, vhost_url)
    cell.listen()
    with at_work(cell, cell.relay("relay 1"), cell.relay("relay 2"), orders=200):
        for name, when in STATEMENTS.items():
            with cell.engine.begin() as connection:  # each by itself: two such locks in one transaction may meet a relay's
                connection.execute(sa.text(FAIL_FIRST.format(name=name, times=4, sqlstate=sqlstate, when=when)))
    for name in STATEMENTS:
        assert cell.scalar(f"SELECT last_value FROM {name}_seq") > 4, "it did fail"
    cell.judge()  # an outcome that could not be written down is written later, not published again


@pytest.mark.matrix
def test_a_lock_is_held_for_longer_than_a_statement_may_take(database_url: str, vhost_url: str) -> None:
    cell = Cell(database_url, vhost_url)
    cell.listen()
    one, two = cell.relay("relay 1"), cell.relay("relay 2")
    with at_work(cell, one, two, orders=200), cell.engine.begin() as connection:
        connection.execute(sa.text("LOCK TABLE outbox_partition IN EXCLUSIVE MODE"))
        until(lambda: "statement timeout" in one.log and "statement timeout" in two.log)
    cell.judge(most_extra=2 * MOST_IN_BATCH)


# ------------------------------------------------------------------------------------------------------------- the clock


@pytest.mark.matrix
def test_the_clocks_of_the_relays_are_an_hour_ahead_and_an_hour_behind(database_url: str, vhost_url: str) -> None:
    cell = Cell(database_url, vhost_url)
    cell.listen()
    ahead, behind = shifted(3600, cell.relay("relay ahead")), shifted(-3600, cell.relay("relay behind"))
    with at_work(cell, ahead, behind, orders=1000):
        pass
    assert (
        cell.scalar("SELECT count(*) FROM outbox_partition WHERE served_at NOT BETWEEN now() - interval '10 min' AND now()") == 0
    )
    cell.judge()  # a relay that took the other's leases for expired would publish again


# ----------------------------------------------------------------------------------------------------------- the writers


def test_fifty_writers_commit_in_another_order_than_their_ids(database_url: str, vhost_url: str) -> None:
    cell = Cell(database_url, vhost_url)
    cell.listen()
    with at_work(cell, cell.relay("relay 1"), cell.relay("relay 2"), orders=0):
        for turn in range(6):
            _crossing_commits(cell, random.Random(turn), first=1000 * (turn + 1))
    cell.judge()


def _crossing_commits(cell: Cell, chance: random.Random, *, first: int, writers: int = 50) -> None:
    """Let all write, then commit one by one in a random order, every fifth rolled back; each has a customer of its own."""
    written = threading.Barrier(writers + 1)
    turns, done = [threading.Event() for _ in range(writers)], [threading.Event() for _ in range(writers)]

    def write(place: int) -> None:
        with Session(cell.engine) as session:
            shop.place(session, str(first + place), f"writer-{place}")
            session.flush()
            written.wait()
            turns[place].wait()
            if place % 5 == first // 1000 % 5:
                session.rollback()
            else:
                session.commit()
        done[place].set()

    threads = [threading.Thread(target=write, args=(place,)) for place in range(writers)]
    for thread in threads:
        thread.start()
    written.wait()
    for place in chance.sample(range(writers), writers):
        turns[place].set()
        done[place].wait()
    for thread in threads:
        thread.join()
