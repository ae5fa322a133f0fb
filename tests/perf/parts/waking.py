"""The producers' side of the wake-ups, and somebody who takes them as a relay does."""

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import click
import sqlalchemy as sa

import outbox
from tests.servers.proc import free_port

_TICK_S = 0.2


def wake_by(engine: sa.Engine, address: str | None) -> sa.Engine:
    """Let the commits of an engine wake a relay, if there is an address; return the engine."""
    if address is not None:
        wake_relay: Any = getattr(outbox, "wake_relay", None)
        if wake_relay is None:
            raise click.UsageError("this version has no wake-ups; give --no-wake")
        wake_relay(engine, address)
    return engine


def new_address() -> str:
    """Return where a relay can listen for datagrams."""
    return f"udp://127.0.0.1:{free_port()}"


@contextmanager
def listening(engine: sa.Engine, address: str) -> Iterator[None]:
    """Take the datagrams and the notifications, and do nothing about them."""
    over = threading.Event()
    works = ((_take_datagrams, address), (_take_notifications, engine))
    threads = [threading.Thread(target=work, args=(source, over)) for work, source in works]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        over.set()
        for thread in threads:
            thread.join()


def _take_datagrams(address: str, over: threading.Event) -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as receiver:
        receiver.bind(("127.0.0.1", int(address.rpartition(":")[2])))
        receiver.settimeout(_TICK_S)
        while not over.is_set():
            with suppress(TimeoutError):
                receiver.recv(64)


def _take_notifications(engine: sa.Engine, over: threading.Event) -> None:
    with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        connection.execute(sa.text("LISTEN outbox_wake"))
        driver: Any = connection.connection.driver_connection
        while not over.is_set():
            for _ in driver.notifies(timeout=_TICK_S):
                pass
        connection.invalidate()  # it must not listen on, in the pool
