"""What a relay tells: one event for a batch, and one for a message only when it has failed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from uuid import UUID

from outbox.outgoing import Outgoing
from outbox.states import Outcome, State, Verdict
from outbox.telemetry.bus import TelemetryEvent


@dataclass(frozen=True)
class BatchClaimed(TelemetryEvent):
    """A batch is leased and read, and that is committed. Fires before anything of it is sent; not for a look that found nothing.

    `messages` are to be published now, `set_aside` were moved out of the way because they must wait. Not promised: that the
    messages are published. The relay may stop, or lose the broker or its lease, before that.
    """

    messages: int
    set_aside: int
    partitions: int
    seconds: float


@dataclass(frozen=True)
class PublishBegan(TelemetryEvent):
    """The rows of a claimed batch are being sent, from now on. `BatchPublished` with the same `rows` follows in the same thread.

    Not promised: that it follows, when the process is killed; nor that a row reaches the broker for the first time.
    """

    rows: Sequence[Outgoing] = field(repr=False)


@dataclass(frozen=True)
class BatchPublished(TelemetryEvent):
    """The publish of a batch is over: `verdicts` has by row id what became of each of `rows`, and nothing is written down yet.

    `seconds` is how long it took, `since_claim_s` how long ago its claim began. `lost` is the error when the connection broke.
    Not promised: that what is confirmed is not published again, after a crash or a lost lease before it is settled.
    """

    rows: Sequence[Outgoing] = field(repr=False)
    verdicts: Mapping[int, Verdict] = field(repr=False)
    seconds: float
    since_claim_s: float
    lost: BaseException | None = None

    def outcomes(self) -> Counter[tuple[str, Outcome]]:
        """Count the messages by topic and outcome."""
        return Counter((row.topic, self.verdicts[row.id].outcome) for row in self.rows)

    def latencies_s(self) -> list[float]:
        """Return how many seconds after its INSERT each confirmed message was known to be published, and a little more.

        The age is the database's at the read, and the time from the claim on the relay's own: no two clocks are compared. Too
        long by no more than the claim and the publish of the batch took.
        """
        confirmed = Outcome.CONFIRMED
        return [row.age_s + self.since_claim_s for row in self.rows if self.verdicts[row.id].outcome is confirmed]


@dataclass(frozen=True)
class BatchFenced(TelemetryEvent):
    """Leases were gone at the settle, so the outcomes of so many messages were dropped, and others publish them again.

    Fires also when a settle was tried again whose COMMIT had an unknown outcome, and had succeeded.
    """

    messages: int


@dataclass(frozen=True)
class _MessageFailed(TelemetryEvent):
    message_id: UUID
    topic: str
    headers: Mapping[str, Any] = field(repr=False)
    attempts: int
    reason: str | None
    error_class: str | None


@dataclass(frozen=True)
class PublishFailed(_MessageFailed):
    """A message could not be published and is tried again in `retry_in_s` seconds; that is committed.

    `attempts` counts the failures of its own so far, which a broker that merely refuses it does not add to. Not for a
    message that only waits, because the broker was lost or an earlier one of its key has failed.
    """

    retry_in_s: float


@dataclass(frozen=True)
class PublishGivenUp(_MessageFailed):
    """A message is dead, by its own failure or with the one before it of its key; that is committed.

    Not promised: one for every dead message. Those that follow a dead one while they wait in the table are moved in one statement.
    """


@dataclass(frozen=True)
class BatchSettled(TelemetryEvent):
    """What became of a batch is committed: so many messages by their new state. Those of lost leases are not among them.

    `first_failure` is one of the events about the messages that have failed, which were told before. Not promised: that `sent` says
    how many reached the broker. Messages may be published, and the settle be lost.
    """

    states: Mapping[State, int]
    seconds: float
    first_failure: PublishFailed | PublishGivenUp | None = None


@dataclass(frozen=True)
class LeaseRenewed(TelemetryEvent):
    """The leases of the batch under way were prolonged: `held` of the `asked` partitions. Fewer means that the relay is fenced."""

    asked: int
    held: int


@dataclass(frozen=True)
class CleanedUp(TelemetryEvent):
    """So many old rows of one kind (`messages`, `processed`, `relays`) were deleted, and that is committed. Not when none were."""

    kind: str
    rows: int
