"""What `outbox-consume` loads."""

from tests.faults.shop import open_inbox

inbox = open_inbox()
