"""`outbox-relay demo`: a shop, a relay that is killed, and a consumer, in one folder and without a server."""
