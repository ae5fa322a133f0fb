"""Wakes relays after the commit of a transaction that has enqueued something, so that they need not poll hard."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import sqlalchemy as sa
from sqlalchemy import event
from sqlalchemy.exc import DBAPIError

from outbox.datagrams import Sender
from outbox.errors import ConfigurationError
from outbox.tables import DEFAULT, Tables
from outbox.targets import bind_of
from outbox.wakeaddress import CHANNEL, Postgres, WakeAddress, parse

if TYPE_CHECKING:
    from outbox.targets import Source

_ENQUEUED = "outbox.enqueued"
_ABORTED = "25P02"  # in_failed_sql_transaction


def wake_relay(source: Source, *addresses: str, tables: Tables = DEFAULT) -> None:
    """Let every transaction of `source` that enqueues something wake the relays at `addresses` when it commits.

    `source` is an `Engine` or `AsyncEngine`, or a factory of sessions (`sessionmaker`, `async_sessionmaker`, or a scoped one),
    whose engine is taken. An address is what a relay was given as `--wake`: `udp://127.0.0.1:7411`,
    `unix:///run/outbox/relay.sock`, or `postgres`. To be called once, when the application starts, before or after a fork;
    calling it again adds what is new.

    With a datagram (`udp`, `unix`): sent after the COMMIT, one however many events there were, at most one in a millisecond
    from one process; it costs the database nothing. Guaranteed: it neither delays nor fails the caller, whatever
    the relay is doing. Not guaranteed: that it arrives. What is lost costs at most the relay's poll interval.

    With `postgres`: one NOTIFY, just before the COMMIT and in the same transaction, so it arrives if and only if that
    commits, at all relays that listen, on whatever hosts. It costs one statement, and PostgreSQL lets transactions that
    notify commit only one after another. Not sent in two-phase transactions, which PostgreSQL forbids.

    Nothing is sent for what is rolled back, nor for transactions that have enqueued nothing. One that has enqueued only in a
    savepoint that was rolled back may wake a relay for nothing, which does no harm. Does not see what is committed behind
    SQLAlchemy's back, on the driver's own connection.

    Raises `ConfigurationError` for an address that cannot work, and for a factory whose sessions have no engine for the outbox.
    """
    engine = bind_of(source, tables)
    parsed = [parse(each) for each in addresses]
    if not parsed:
        raise ConfigurationError("wake_relay: name at least one address, such as udp://127.0.0.1:7411")
    if Postgres() in parsed and engine.dialect.name != "postgresql":
        raise ConfigurationError(f"wake: 'postgres' needs a PostgreSQL database, not {engine.dialect.name!r}; use a datagram")
    with _lock:
        if engine.dialect not in _woken_by:
            _woken_by[engine.dialect] = _Wakes(engine)
        _woken_by[engine.dialect].add(parsed)


def enqueued(connection: sa.Connection) -> None:
    """Note that the transaction that this connection is in has enqueued something."""
    if _woken_by and connection.dialect in _woken_by:
        connection.info[_ENQUEUED] = True


class _Wakes:
    """The relays that commits on one engine wake."""

    def __init__(self, engine: sa.Engine) -> None:
        self._engine = engine
        self._senders: dict[WakeAddress, Sender] = {}
        self._notifies = False
        # No event comes after the COMMIT of a Connection, and a wake-up before it would find nothing yet. Nor is there a listener for
        # anything else: with the first one, SQLAlchemy takes a longer way through every statement of the engine.
        dialect: Any = engine.dialect
        for name in ("do_commit", "do_commit_twophase"):
            setattr(dialect, name, self._then_wake(getattr(dialect, name)))
        for name in ("do_rollback", "do_rollback_twophase"):
            setattr(dialect, name, _forgetting(getattr(dialect, name)))

    def add(self, addresses: list[WakeAddress]) -> None:
        for address in addresses:
            if isinstance(address, Postgres):
                if not self._notifies:
                    event.listen(self._engine, "commit", self._before_commit)
                self._notifies = True
            elif address not in self._senders:
                self._senders = {**self._senders, address: Sender(address)}  # replaced, not changed: others may be sending

    def _before_commit(self, connection: sa.Connection) -> None:
        if _ENQUEUED not in connection.info:
            return
        try:
            connection.execute(sa.select(sa.func.pg_notify(CHANNEL, "")))
        except DBAPIError as error:
            # After an error that was swallowed this COMMIT will roll back. That is for whoever swallowed it to find out.
            if getattr(error.orig, "sqlstate", getattr(error.orig, "pgcode", None)) != _ABORTED:
                raise

    def _then_wake(self, commit: Any) -> Any:
        def commit_and_wake(connection: Any, *more: Any, **named: Any) -> None:
            wanted = _forget(connection)
            commit(connection, *more, **named)
            if wanted:
                for sender in self._senders.values():
                    sender.wake()

        return commit_and_wake


def _forgetting(rollback: Any) -> Any:
    def forget_and_roll_back(connection: Any, *more: Any, **named: Any) -> None:
        _forget(connection)
        rollback(connection, *more, **named)

    return forget_and_roll_back


def _forget(connection: Any) -> bool:
    """Forget what was enqueued in the transaction that ends; tell whether something was."""
    try:
        info = connection.info  # of the pool's connection, or of SQLAlchemy's
    except (AttributeError, NotImplementedError):  # the driver's own, or SQLAlchemy's very first look at a database
        return False
    return isinstance(info, dict) and bool(info.pop(_ENQUEUED, False))


_lock = threading.Lock()
_woken_by: WeakKeyDictionary[sa.Dialect, _Wakes] = WeakKeyDictionary()
