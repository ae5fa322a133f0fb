"""A shop whose work after an order is done by Celery: a parcel is packed, paid for, and sent."""
