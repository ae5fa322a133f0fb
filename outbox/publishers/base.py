"""What a publisher is: the protocol that the relay works with."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Sequence

    from outbox.errors import BrokerUnavailable
    from outbox.outgoing import Outgoing
    from outbox.states import Verdict


class Control(Protocol):
    """How the relay steers a publish that is under way."""

    def may_send(self) -> bool:
        """Tell whether another message may go on the wire: the lease is alive and nobody asked to stop."""

    def may_wait(self) -> bool:
        """Tell whether to go on waiting for confirms of what is on the wire."""

    def progress(self) -> None:
        """Note that the broker has answered; renews the lease when that is due."""


class Steady(Control):
    """The control of a publish that has no lease and is not asked to stop: it goes on to the end."""

    def may_send(self) -> bool:
        """Say yes."""
        return True

    def may_wait(self) -> bool:
        """Say yes."""
        return True

    def progress(self) -> None:
        """Do nothing."""


@dataclass(slots=True)
class Published:
    """What became of a batch: a verdict for every row by its id, and the error if the connection was lost."""

    verdicts: dict[int, Verdict] = field(default_factory=dict)
    lost: BrokerUnavailable | None = None


class Publisher(Protocol):
    """Publishes batches; used by one thread.

    A verdict `confirmed` is given only for what the broker said it has. Two messages of one key are never
    in flight together, and after one has failed the rest of its key in the batch is `held`.
    """

    @property
    def blocked(self) -> bool:
        """The broker has asked us to pause (a memory or disk alarm)."""

    def connect(self) -> None:
        """Connect and declare, if not connected.

        Raises `BrokerUnavailable` if the broker cannot be reached, `BrokerRefused` if it says no.
        """

    def publish(self, rows: Sequence[Outgoing], control: Control) -> Published:
        """Publish a batch and wait for what becomes of it. Raises nothing that comes from the broker."""

    def tick(self) -> None:
        """Keep an idle connection alive. Raises `BrokerUnavailable` if it turns out to be lost."""

    def close(self) -> None:
        """Close the connection; may be called twice."""
