"""Payments: an order is charged at a provider over HTTP, which no transaction covers, and still only once."""
