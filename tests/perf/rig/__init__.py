"""What several benchmarks stand on: sizes, queues, tables, relays, and processes that work at the same time."""
