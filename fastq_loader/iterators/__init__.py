"""The iterators of a loader: one over a pool of workers, and one that loads by itself.

Runs in the consumer.
"""
