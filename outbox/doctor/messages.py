"""Checks of what stands in the outbox, and of the relays that should have sent it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from outbox import __version__
from outbox.doctor.findings import info, problem, some, span, warning
from outbox.spans import redelivery_span
from outbox.store import server, symptoms
from outbox.store.failed_stats import consumer_stats
from outbox.store.oldest import oldest_unsent_s
from outbox.store.pauses import listed
from outbox.store.registry import Broker, relays
from outbox.store.stats import MOST_COUNTED
from outbox.tables import SCHEMA_VERSION
from outbox.topics import matches

if TYPE_CHECKING:
    from collections.abc import Iterator

    from outbox.doctor.findings import Finding
    from outbox.doctor.scope import Database
    from outbox.store.registry import Seen

LATE_S = 60.0
FAR_S = 366 * 86_400.0
_READ: dict[str, dict[str, tuple[str, ...]]] = {"failed_messages": {"SELECT": ()}}


def at_work(database: Database) -> Iterator[Finding]:
    """Relays are at work, all of one version, and find the broker."""
    found = relays(database.connection, database.tables)
    alive = [each for each in found if not each.silent]
    if not alive:
        last = min((each.seen_ago_s for each in found), default=None)
        yield problem(
            "no relay is at work" + ("" if last is None else f"; the last one was seen {span(last)} ago"),
            "nothing is published, and messages gather",
            "start one (outbox-relay run), or look at its log: exit codes 2 to 5 say what keeps it from starting",
        )
    for each in found:
        if each.silent and alive:
            yield warning(
                f"relay {each.owner} was last seen {span(each.seen_ago_s)} ago",
                "it was killed, hangs, or is cut off from the database; others have taken over its partitions",
                "see that it was started again (--health and a probe on /livez); a killed one is forgotten after a day",
            )
    yield from _versions(alive)
    yield from _brokers(alive)


def _versions(alive: list[Seen]) -> Iterator[Finding]:
    versions = sorted({each.version for each in alive})
    if len(versions) > 1:
        yield warning(
            f"relays of different versions are at work: {', '.join(versions)}",
            "messages that only the newer one understands wait for it, and settings may mean different things",
            "finish the update",
        )
    elif versions and versions != [__version__]:
        yield info(f"the relays are of version {versions[0]}, and this command of {__version__}")


def _brokers(alive: list[Seen]) -> Iterator[Finding]:
    for state, consequence, remedy in (
        (Broker.UNREACHABLE, "it publishes nothing", "see the check broker, and the network between relay and broker"),
        (
            Broker.BLOCKED,
            "a memory or disk alarm: the broker takes nothing",
            "rabbitmqctl list_alarms; free memory or disk, or let consumers drain queues",
        ),
    ):
        owners = [each.owner for each in alive if each.broker == state]
        if owners:
            yield problem(f"the broker is {state}, say {some(owners)}", consequence, remedy)


def late(database: Database) -> Iterator[Finding]:
    """Nothing that could have been sent has been waiting for long."""
    oldest_s = oldest_unsent_s(database.connection, database.tables)
    if oldest_s is not None and oldest_s > LATE_S:
        yield problem(
            f"a message has been waiting for {span(oldest_s)}",
            "what depends on it does not happen",
            "see the other checks: no relay, the broker, a pause, a dead message of its key; else more relays. outbox-relay status",
        )


def dead_letters(database: Database) -> Iterator[Finding]:
    """Nothing was given up."""
    found = symptoms.dead(database.connection, database.tables)
    if found is None:
        return
    more = "+" if found.count >= MOST_COUNTED else ""
    classes = some(f"{name} {count}" for name, count in found.error_classes.items())
    yield warning(
        f"{found.count}{more} messages are dead, the oldest for {span(found.oldest_s)}: {classes}",
        "they are not published until somebody decides",
        "outbox-relay dead list; mend the cause, then outbox-relay dead retry, or dead discard",
    )
    remembered_s = database.scope.inbox_retention_s
    if remembered_s is not None and found.oldest_s > remembered_s:
        yield warning(
            f"some have been dead for longer than --inbox-retention ({span(remembered_s)})",
            "one that was received in spite of its failure, and is retried now, is handled a second time",
            "make sure of each before it is retried, or discard it",
        )


def blocked_keys(database: Database) -> Iterator[Finding]:
    """No key waits for an operator."""
    keys = symptoms.held_by_dead(database.connection, database.tables)
    if keys:
        yield warning(
            f"messages of {len(keys)} keys wait behind a dead one: {some(keys)}",
            "nothing of these keys is published",
            "outbox-relay dead retry --key KEY, or dead discard; --on-dead says what becomes of a key",
        )


def paused(database: Database) -> Iterator[Finding]:
    """No pause was forgotten."""
    pauses = listed(database.connection, database.tables)
    blocked = symptoms.blocked_topics(database.connection, database.tables) if pauses else {}
    for each in pauses:
        waiting = sum(number for topic, number in blocked.items() if matches(each.topics, topic))
        if each.resuming:
            yield warning(
                f"a resume of {each.topics} was begun, and has not ended",
                f"{waiting} messages of these topics wait, if it was interrupted",
                f"outbox-relay resume '{each.topics}'",
            )
        elif waiting:
            yield warning(
                f"{each.topics} is paused for {span(each.paused_for_s)}, and {waiting} messages wait",
                "they are not published, nor are later ones of their keys",
                f"outbox-relay resume '{each.topics}'",
            )
        else:
            yield info(f"{each.topics} is paused for {span(each.paused_for_s)}; nothing waits")


def scheduled_far(database: Database) -> Iterator[Finding]:
    """Nothing is scheduled for a time that nobody meant."""
    found = symptoms.scheduled_after(database.connection, database.tables, FAR_S)
    if found is not None:
        number, last = found
        yield warning(
            f"{number}{'+' if number >= MOST_COUNTED else ''} messages are due in more than a year, the last {last:%Y-%m-%d}",
            "they are published then; milliseconds taken for seconds, as a rule",
            "outbox-relay messages list --state scheduled; enqueue them anew, and DELETE these by message_id",
        )


def newer_messages(database: Database) -> Iterator[Finding]:
    """No message is of a version that this release does not know."""
    newest = symptoms.newest_version(database.connection, database.tables)
    if newest > SCHEMA_VERSION:
        yield problem(
            f"messages of schema version {newest} are pending, and this release knows {SCHEMA_VERSION}",
            "relays of this release leave them alone, and later ones of their keys may overtake them",
            "update the relays before the applications",
        )


def inbox_retention(database: Database) -> Iterator[Finding]:
    """Consumers remember what they have handled for longer than a relay may publish it again."""
    scope = database.scope
    retention_s = scope.inbox_retention_s
    needed = redelivery_span(scope.policies, lease_s=scope.lease_s, poll_interval_s=scope.poll_interval_s)
    if retention_s is not None and retention_s <= needed.total_s:
        yield problem(
            f"--inbox-retention is {span(retention_s)}, and a relay may publish a message again for {needed}",
            "consumers handle a message a second time; the relay refuses to start",
            "make it longer: also than an outage, a stay in a dead-letter queue, and the time until an operator retries",
        )


def consumers(database: Database) -> Iterator[Finding]:
    """No consumer has messages that it has given up, or that nobody tries."""
    connection, tables = database.connection, database.tables
    if database.is_postgresql and server.missing_rights(connection, tables.schema, _READ):
        yield info(f"role {server.role(connection)} may not read failed_messages, as a relay's need not; an operator's may")
        return
    for consumer in symptoms.consumers(connection, tables):
        messages = consumer_stats(connection, tables, consumer).messages
        if messages["dead"]:
            behind = f", and {messages['blocked']} wait behind them or others" if messages["blocked"] else ""
            yield warning(
                f"consumer {consumer} has given up {messages['dead']} messages{behind}",
                "they have had no effect, until somebody decides",
                "outbox-consume dead list MODULE:INBOX; mend the cause, then dead retry or dead discard",
            )
        overdue_s = symptoms.overdue_s(connection, tables, consumer)
        if overdue_s > LATE_S:
            yield problem(
                f"consumer {consumer} has {messages['retry']} messages to try again, the first due for {span(overdue_s)}",
                "nobody tries them: the consumer does not run, hangs, or is overloaded",
                "start outbox-consume, or look at its log; outbox-consume status MODULE:INBOX",
            )
        elif messages["blocked"] and not messages["retry"] and not messages["dead"]:
            yield problem(
                f"consumer {consumer} has {messages['blocked']} messages that wait for no other",
                "nothing lets them go",
                "outbox-consume dead list MODULE:INBOX; then UPDATE failed_messages SET state = 'retry' for the first of each key",
            )
