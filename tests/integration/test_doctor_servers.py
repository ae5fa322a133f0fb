"""What `outbox-relay doctor` finds at servers that have to be set up, or to hang, for it: they are the test's own."""

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

from outbox import __version__
from outbox.doctor import vacuum
from outbox.store import registry
from outbox.store.registry import Broker
from outbox.tables import DEFAULT
from tests.diagnosing import System, declare_consumer, of_level
from tests.faults.standby import Standby
from tests.integration.test_relay import until
from tests.rows import database
from tests.servers.postgres import Postgres
from tests.servers.rabbitmq import RabbitMQ

pytestmark = pytest.mark.matrix


@pytest.fixture(scope="module")
def server() -> Iterator[Postgres]:
    with Postgres() as found:
        with found._administrator() as connection:
            connection.execute(sa.text("ALTER SYSTEM SET max_prepared_transactions = 5"))
        found.restart()
        yield found


@pytest.fixture(scope="module")
def broker() -> Iterator[RabbitMQ]:
    with RabbitMQ(management=True) as found:
        declare_consumer(found.url)
        yield found


@pytest.fixture
def system(server: Postgres, tmp_path: Path) -> Iterator[System]:
    url = server.create_database()
    engine = database(url)
    with engine.begin() as connection:
        registry.note(connection, DEFAULT, owner="web-1", version=__version__, broker=Broker.CONNECTED)
    found = System(url, "", "", engine, tmp_path, ExitStack())
    found.options = {"--database-url": url}
    yield found
    found.close()


def worst(report: dict[str, Any]) -> dict[str, str]:
    """What each check has found, in words, where it is a problem or a warning."""
    return {name: findings[0]["found"] for name, findings in of_level(report, "problem", "warning").items()}


@pytest.mark.parametrize(
    ("setting", "check"),
    [("fsync", "durability"), ("full_page_writes", "durability"), ("autovacuum", "autovacuum"), ("track_counts", "autovacuum")],
)
def test_a_setting_of_the_server(setting: str, check: str, system: System) -> None:
    system.sql(f"ALTER SYSTEM SET {setting} = off", "SELECT pg_reload_conf()")
    system.later.callback(system.sql, f"ALTER SYSTEM RESET {setting}", "SELECT pg_reload_conf()")

    until(lambda: worst(system.doctor()) == {check: f"{setting} is off"})


def test_a_prepared_transaction(system: System, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vacuum, "LONG_S", 0.0)
    with system.engine.connect() as connection:
        connection.exec_driver_sql("BEGIN; UPDATE outbox_relay SET broker = 'x'; PREPARE TRANSACTION 'forgotten'")
    system.later.callback(system.sql, "ROLLBACK PREPARED 'forgotten'")

    assert "transaction 'forgotten' of outbox was prepared" in worst(system.doctor())["prepared-transactions"]


def test_a_standby(server: Postgres, system: System) -> None:
    with Standby(server) as standby:
        system.options["--database-url"] = (
            sa.make_url(system.database_url).set(port=standby.port).render_as_string(hide_password=False)
        )
        found = worst(system.doctor())
        system.sql("ALTER SYSTEM RESET synchronous_standby_names", "SELECT pg_reload_conf()")

    assert found == {"primary": "this server is a standby (in recovery)"}


def test_a_memory_alarm(system: System, broker: RabbitMQ) -> None:
    system.options |= {"--broker-url": broker.url, "--management-url": broker.management_url}
    assert worst(system.doctor(code=0)) == {}

    broker.ctl("set_vm_memory_high_watermark", "0.00001")
    until(lambda: worst(system.doctor()) == {"broker-alarms": "the broker has an alarm: memory on outbox@localhost"})

    broker.ctl("set_vm_memory_high_watermark", "0.4")
