"""What "published" means on each of kombu's transports: one table."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Acknowledged(StrEnum):
    """What tells the relay that a message has arrived."""

    CONFIRM = "confirm"  # the broker confirms each message
    REPLY = "reply"  # the call returns after the broker or store has answered
    NOTHING = "nothing"  # nobody says anything: a message can be lost without an error


@dataclass(frozen=True, slots=True)
class Transport:
    """How far a transport can be trusted with `published`, and what can still be lost behind it."""

    acknowledged: Acknowledged
    loss: str


_C, _R, _N = Acknowledged.CONFIRM, Acknowledged.REPLY, Acknowledged.NOTHING

# Source: the transports of kombu 5.7. Keys are the transport's module below kombu.transport.
TRANSPORTS = {
    "pyamqp": Transport(_C, "nothing: confirmed, mandatory, persistent"),
    "redis": Transport(_R, "what Redis had not yet written to its append-only file, or not yet replicated at a failover"),
    "sqlalchemy": Transport(_R, "nothing after COMMIT; not a broker for production: rows are never deleted, no fanout"),
    "filesystem": Transport(_R, "what the operating system had not yet written (no fsync); a reader may see a torn file"),
    "memory": Transport(_R, "everything when the process ends; only consumers in the same process see it"),
    "SQS": Transport(_R, "nothing after the HTTP reply"),
    "mongodb": Transport(_R, "what the default write concern allows"),
    "azureservicebus": Transport(_R, "nothing after the reply"),
    "azurestoragequeues": Transport(_R, "nothing after the reply"),
    "etcd": Transport(_R, "nothing after the reply"),
    "consul": Transport(_R, "nothing after the reply"),
    "zookeeper": Transport(_R, "nothing after the reply"),
    "pgmq": Transport(_R, "nothing after the INSERT"),
    "pyro": Transport(_N, "everything that the remote process holds in memory"),
    "confluentkafka": Transport(_N, "any message: kombu asks for no delivery report"),
    "gcpubsub": Transport(_N, "any message: kombu does not wait for the publish to finish"),
}
UNKNOWN = Transport(_N, "unknown: this transport has not been examined")
