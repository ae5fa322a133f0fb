"""What the benchmarks are put together from."""
