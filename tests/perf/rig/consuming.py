"""What `outbox-consume` loads."""

from tests.perf.rig.consumers import inbox

with_dedup = inbox(dedup=True)
without_dedup = inbox(dedup=False)
