"""Moves batches to an accelerator: page-locking, copies on a side stream, transforms.

Runs in the consumer, on the thread that calls `next()`.
"""
