"""A clinic whose findings nobody reads on their way: not in the outbox, not in the broker, not among the dead letters."""
