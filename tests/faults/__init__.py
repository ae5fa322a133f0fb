"""Faults: processes are killed and servers stopped, and the books must balance. Judged from business tables."""
