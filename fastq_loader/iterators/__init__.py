"""What `iter(loader)` returns: an iterator over a pool of workers, or one that loads by itself.

Runs in the consumer.
"""
