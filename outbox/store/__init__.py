"""All SQL of the relay: one function per statement, grouped by what it is for."""
