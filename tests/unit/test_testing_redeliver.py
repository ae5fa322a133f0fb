"""`redeliver` on SQLite: where it starts, what it compares, in which orders it delivers, and how it says what differs."""

import urllib.request
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
import sqlalchemy as sa
from sqlalchemy.orm import Session, sessionmaker

import outbox
from outbox import Inbox, Message, points
from outbox.errors import ConfigurationError
from outbox.testing import Answer, Call, Scenario, redeliver
from tests import bank
from tests.bank import DEPOSIT, account, contents, deposit, failure, handling, payment


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[sa.Engine]:
    with bank.opened(f"sqlite:///{tmp_path}/bank.db") as engine:
        yield engine


def test_the_database_is_afterwards_as_it_was(engine: sa.Engine) -> None:
    before = contents(engine)
    redeliver(handling(engine, deposit), DEPOSIT, metadata=bank.metadata)
    assert contents(engine) == before
    assert "another effect" in failure(handling(engine, deposit, mode="idempotent", because="it is not"))
    assert contents(engine) == before
    assert points.hook is None


def test_it_works_in_memory() -> None:
    with bank.opened("sqlite://") as engine:
        redeliver(handling(engine, deposit), DEPOSIT, metadata=bank.metadata)
        assert "another effect" in failure(handling(engine, deposit, mode="idempotent", because="it is not"))


def test_what_two_plain_deliveries_fill_in_differently_is_not_compared(engine: sa.Engine) -> None:
    def handle(session: Session, message: Message) -> None:
        session.execute(payment.insert().values(account="ann", note=str(uuid4()), details={"trace": str(uuid4())}))

    tried = redeliver(handling(engine, handle), DEPOSIT, metadata=bank.metadata)
    assert tried.not_compared == ("payment.details", "payment.note")


def test_a_time_in_whole_seconds_is_known_for_one_that_was_just_made(engine: sa.Engine) -> None:
    seconds = iter(range(100))

    def handle(session: Session, message: Message) -> None:
        made = datetime.now(UTC).replace(microsecond=0, tzinfo=None) + timedelta(seconds=next(seconds) // 2)
        session.execute(payment.insert().values(account="ann", paid_at=made))

    redeliver(handling(engine, handle), DEPOSIT, metadata=bank.metadata, scenarios=[Scenario.KILLED])


def test_a_time_that_is_moved_on_is_compared(engine: sa.Engine) -> None:
    with engine.begin() as connection:
        connection.execute(payment.update().values(paid_at=datetime(2020, 1, 1)))  # noqa: DTZ001 - the column has none

    def prolong(session: Session, message: Message) -> None:
        paid_at = session.execute(sa.select(payment.c.paid_at)).scalar_one()
        session.execute(payment.update().values(paid_at=paid_at + timedelta(days=30)))

    said = failure(handling(engine, prolong, mode="idempotent", because="it is not"), scenarios=[Scenario.TWICE])
    assert said.endswith(
        "delivered twice in a row:\n  payment: column paid_at is"
        " datetime.datetime(2020, 3, 1, 0, 0), expected datetime.datetime(2020, 1, 31, 0, 0)  (id=1)"
    )


def test_columns_can_be_ignored(engine: sa.Engine) -> None:
    inbox = handling(engine, deposit, mode="idempotent", because="only the balance counts, and that is not looked at")

    @inbox.idempotent("balances.counted", because="count is for statistics")
    def count(session: Session, message: Message) -> None:
        session.execute(payment.update().values(amount=payment.c.amount + 1, note="counted"))

    message = Message(message_id="m-2", topic="balances.counted", payload=b"")
    assert "payment: column amount" in failure(inbox, message)
    for name in ("amount", "payment.amount"):
        redeliver(inbox, message, metadata=bank.metadata, ignore=[name])


def test_one_delivery_that_is_not_the_same_each_time_cannot_be_judged(engine: sa.Engine) -> None:
    often = iter(range(1, 10))

    def handle(session: Session, message: Message) -> None:
        for _ in range(next(often)):
            session.execute(payment.insert().values(account="ann"))

    assert "two plain deliveries from the same state do not lead to the same result" in failure(handling(engine, handle))


def test_a_handler_without_an_effect_that_can_be_seen_is_an_error(engine: sa.Engine) -> None:
    assert "has no effect that can be seen" in failure(handling(engine, lambda _session, _message: None))


def test_a_message_that_was_handled_before_is_an_error(engine: sa.Engine) -> None:
    inbox = handling(engine, deposit)
    inbox.process(DEPOSIT)
    assert "did not run: message m-1 is recorded as handled already" in failure(inbox)


def test_an_event_enqueued_twice_is_told_with_its_parts(engine: sa.Engine) -> None:
    def handle(session: Session, message: Message) -> None:
        outbox.enqueue(session, outbox.Event(topic="payments.booked", payload={"amount": 5}, key="ann", headers={"by": "me"}))

    said = failure(handling(engine, handle, mode="idempotent", because="it is not"), scenarios=[Scenario.TWICE])
    assert "events enqueued: a row too many: topic='payments.booked', key='ann'" in said
    assert "payload.amount=5, headers.by='me'" in said


def test_a_handler_that_fails_when_it_comes_again(engine: sa.Engine) -> None:
    def handle(session: Session, message: Message) -> None:
        if message.redelivered:
            raise OSError("again?")
        deposit(session, message)

    said = failure(handling(engine, handle))
    assert "killed before commit, then delivered again:\n  it failed each time, in the end with OSError: again?" in said
    assert str(Scenario.TWICE) not in said


def test_another_order_leads_to_another_result(engine: sa.Engine) -> None:
    def set_it(session: Session, message: Message) -> None:
        session.execute(account.update().where(account.c.name == "ann").values(balance=message.json()))

    first, second = (Message(message_id=f"m-{n}", topic=DEPOSIT.topic, payload=str(n).encode(), key="ann") for n in (1, 2))
    inbox = handling(engine, set_it)
    said = failure(inbox, first, after=[second])
    assert said.endswith("delivered in another order: 2, 1:\n  account: column balance is 1, expected 2  (name='ann')")
    assert str(Scenario.LATE) not in said
    again = failure(handling(engine, set_it, mode="idempotent", because="no"), first, after=[second], scenarios=[Scenario.LATE])
    assert "delivered again after later messages:\n  account: column balance is 1, expected 2" in again


def test_a_handler_that_refuses_what_comes_too_early_gets_it_again(engine: sa.Engine) -> None:
    inbox = Inbox("bank", sessions=sessionmaker(engine))

    @inbox.transactional("accounts.opened")
    def open_account(session: Session, message: Message) -> None:
        session.execute(account.insert().values(name="eve", balance=0))

    @inbox.transactional("deposits.made")
    def book(session: Session, message: Message) -> None:
        if session.execute(account.update().where(account.c.name == "eve").values(balance=5)).rowcount == 0:
            raise LookupError("no such account yet")

    opening, booking = (Message(message_id=topic, topic=topic, payload=b"") for topic in ("accounts.opened", "deposits.made"))
    tried = redeliver(inbox, booking, metadata=bank.metadata, before=[opening])
    assert "delivered in another order: 2, 1" in tried.ran


def test_scenarios_can_be_chosen_and_must_apply(engine: sa.Engine) -> None:
    inbox = handling(engine, deposit)
    assert redeliver(inbox, DEPOSIT, metadata=bank.metadata, scenarios=[Scenario.TWICE]).ran == (Scenario.TWICE,)
    with pytest.raises(ConfigurationError, match="before= or after="):
        redeliver(inbox, DEPOSIT, metadata=bank.metadata, scenarios=[Scenario.LATE, Scenario.LEASE_LOST])


def test_reset_takes_the_place_of_putting_the_rows_back(engine: sa.Engine) -> None:
    resets = []

    def reset() -> None:
        resets.append(1)
        with engine.begin() as connection:
            for table in (*reversed(bank.metadata.sorted_tables), outbox.metadata.tables["processed_messages"]):
                connection.execute(table.delete())
            connection.execute(account.insert().values(name="ann", balance=100))

    redeliver(handling(engine, deposit), DEPOSIT, metadata=bank.metadata, scenarios=[Scenario.TWICE], reset=reset)
    assert len(resets) == 4
    assert contents(engine)["account"] == [("ann", 100)]


def test_a_state_that_cannot_be_put_back_is_an_error_that_names_reset(engine: sa.Engine) -> None:
    with engine.begin() as connection:
        connection.exec_driver_sql("CREATE TRIGGER keep BEFORE DELETE ON payment BEGIN SELECT RAISE(ABORT, 'kept'); END")
    with pytest.raises(ConfigurationError, match=r"cannot be put back \(kept\); give redeliver\(reset="):
        redeliver(handling(engine, deposit), DEPOSIT, metadata=bank.metadata)


def test_foreign_keys_in_a_circle_are_an_error(engine: sa.Engine) -> None:
    metadata = sa.MetaData()
    sa.Table("a", metadata, sa.Column("id", sa.ForeignKey("b.id"), primary_key=True))
    sa.Table("b", metadata, sa.Column("id", sa.ForeignKey("a.id"), primary_key=True))
    with pytest.raises(ConfigurationError, match="circle"):
        redeliver(handling(engine, deposit), DEPOSIT, metadata=[bank.metadata, metadata])


def pay(session: Any, message: Message) -> None:
    request = urllib.request.Request("https://provider.example/charges", data=b"5", headers={"X-Request-Id": message.message_id})
    with urllib.request.urlopen(request) as response:
        session.execute(payment.insert().values(account="ann", note=response.read().decode()))


def test_calls_are_answered_by_the_test_and_the_key_may_have_another_name(engine: sa.Engine) -> None:
    inbox, asked = handling(engine, pay), list[Call]()

    def respond(call: Call) -> Answer:
        asked.append(call)
        return Answer(201, b"charge-1")

    assert "https://provider.example/charges had an effect 2 times" in failure(inbox, respond=respond)
    tried = redeliver(inbox, DEPOSIT, metadata=bank.metadata, respond=respond, key_header="X-Request-ID")
    assert tried.calls[0] == asked[0]
    redeliver(inbox, DEPOSIT, metadata=bank.metadata, respond=respond, repeatable=lambda call: call.url.endswith("charges"))


def test_a_call_that_only_reads_may_be_repeated(engine: sa.Engine) -> None:
    def look(session: Session, message: Message) -> None:
        urllib.request.urlopen("https://rates.example/today").close()
        deposit(session, message)

    assert redeliver(handling(engine, look), DEPOSIT, metadata=bank.metadata).calls[0].is_harmless


def test_the_same_key_with_another_body_is_told(engine: sa.Engine) -> None:
    def handle(session: Session, message: Message) -> None:
        headers = {"Idempotency-Key": message.message_id}
        urllib.request.urlopen(urllib.request.Request("https://p.example/", data=uuid4().bytes, headers=headers)).close()

    assert "was repeated with the same Idempotency-Key m-1 and another body" in failure(handling(engine, handle))
