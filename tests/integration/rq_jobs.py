"""The functions that RQ's workers run in the tests. Each holds at the gate, in mid-job, while the test keeps it closed."""

import os
import time
from pathlib import Path

import sqlalchemy as sa
from rq import Retry
from sqlalchemy.orm import Session, sessionmaker

import outbox.rq
from outbox.inbox import Lease

GATE = 7  # an advisory lock: whoever holds it alone decides when jobs go on
engine = sa.create_engine(os.environ.get("OUTBOX_DATABASE_URL", "sqlite://"), poolclass=sa.NullPool)
sessions = sessionmaker(engine)
effects = sa.Table("effects", sa.MetaData(), sa.Column("name", sa.Text))  # a job that ran twice shows as two rows
charges = sa.Table("charges", effects.metadata, sa.Column("key", sa.Text))  # what a payment provider was asked for


def pass_gate(session: Session) -> None:
    print("in mid-job", os.getpid(), flush=True)
    if session.get_bind().dialect.name == "postgresql":
        session.execute(sa.text(f"SELECT pg_advisory_xact_lock_shared({GATE})"))


def first_time(mark: str) -> bool:
    first = not Path(mark).exists()
    Path(mark).touch()
    return first


@outbox.rq.transactional("shop", sessions=sessions)
def ship(session: Session, name: str) -> str:
    session.execute(effects.insert().values(name=name))
    pass_gate(session)
    return f"shipped {name}"


@outbox.rq.transactional("shop", sessions=sessions)
def fail_once(session: Session, name: str, mark: str) -> None:
    session.execute(effects.insert().values(name=name))
    if first_time(mark):
        raise ValueError("the first run fails")


@outbox.rq.transactional("shop", sessions=sessions)
def ask_again(session: Session, name: str, mark: str) -> object:
    first = first_time(mark)
    session.execute(effects.insert().values(name="undone" if first else name))
    return Retry(max=1) if first else None


@outbox.rq.leased("payments", sessions=sessions, lease_s=2, time_limit_s=20)
def charge(lease: Lease, name: str) -> str:
    with sessions.begin() as provider:  # stands for a system outside, which commits for itself
        provider.execute(charges.insert().values(key=lease.idempotency_key))
    with sessions.begin() as session:
        pass_gate(session)
    return f"charged {name}"


@outbox.rq.leased("payments", sessions=sessions, lease_s=2, time_limit_s=20)
def charge_later(lease: Lease, name: str, mark: str) -> object:
    if first_time(mark):
        return Retry(max=1)
    with sessions.begin() as provider:
        provider.execute(charges.insert().values(key=name))
    return None


def plain(name: str) -> str:
    return f"ran {name} at {time.time()}"


def calls_another(name: str) -> None:
    ship(name)
