"""Looks at a whole outbox, database and broker, for what has gone wrong elsewhere, and says what to do. Changes nothing."""
