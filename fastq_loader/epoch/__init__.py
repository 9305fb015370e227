"""The iterators of a loader: one over a pool of workers, and one without workers.

Runs in the consumer.
"""
