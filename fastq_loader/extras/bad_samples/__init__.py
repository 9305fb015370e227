"""Samples that cannot be read: `errors=Replace(...)` and `errors=Skip(...)`."""
