"""What `iter(loader)` returns: with workers and without them.

Runs in the consumer.
"""
