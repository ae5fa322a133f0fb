"""A shop: an order is placed, then paid, then shipped, each in a transaction of its own."""
