"""Benchmarks. Each compares two ways in one run, alternating, and reports a ratio of medians."""
