"""All checks, in the order in which they are run and told. A name stays as it is: others have written it into their alerts."""

from __future__ import annotations

from outbox.doctor import broker, messages, routing, server, tables, vacuum
from outbox.doctor.scope import BrokerCheck, DatabaseCheck

DATABASE = (
    DatabaseCheck("database", server.reachable, everywhere=True),
    DatabaseCheck("primary", server.writable),
    DatabaseCheck("schema", tables.schema, everywhere=True),
    DatabaseCheck("privileges", tables.privileges),
    DatabaseCheck("durability", server.durability),
    DatabaseCheck("timeouts", server.timeouts),
    DatabaseCheck("isolation", server.isolation),
    DatabaseCheck("connections", server.connections),
    DatabaseCheck("clock", server.clock),
    DatabaseCheck("pooler", server.pooler),
    DatabaseCheck("wake", server.wake),
    DatabaseCheck("transactions", vacuum.transactions),
    DatabaseCheck("prepared-transactions", vacuum.prepared_transactions),
    DatabaseCheck("replication-slots", vacuum.replication_slots),
    DatabaseCheck("autovacuum", vacuum.autovacuum),
    DatabaseCheck("dead-rows", vacuum.dead_rows),
    DatabaseCheck("transaction-ids", server.age),
    DatabaseCheck("relays", messages.at_work, everywhere=True),
    DatabaseCheck("late-messages", messages.late, everywhere=True),
    DatabaseCheck("dead-letters", messages.dead_letters, everywhere=True),
    DatabaseCheck("blocked-keys", messages.blocked_keys, everywhere=True),
    DatabaseCheck("pauses", messages.paused, everywhere=True),
    DatabaseCheck("far-future", messages.scheduled_far, everywhere=True),
    DatabaseCheck("newer-messages", messages.newer_messages, everywhere=True),
    DatabaseCheck("inbox-retention", messages.inbox_retention, everywhere=True),
    DatabaseCheck("consumers", messages.consumers, everywhere=True),
)
BROKER = (
    BrokerCheck("broker", broker.reachable, amqp=False),
    BrokerCheck("exchanges", broker.exchanges),
    BrokerCheck("queues", broker.queues),
)
MANAGEMENT = (
    BrokerCheck("broker-alarms", routing.alarms, management=True),
    BrokerCheck("bindings", routing.bindings, management=True),
    BrokerCheck("queue-limits", routing.queue_limits, management=True),
)
NAMES = tuple(check.name for check in (*DATABASE, *BROKER, *MANAGEMENT))
