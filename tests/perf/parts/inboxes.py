"""What `outbox-consume` loads."""

from tests.perf.parts.consumers import inbox

with_dedup = inbox(dedup=True)
without_dedup = inbox(dedup=False)
