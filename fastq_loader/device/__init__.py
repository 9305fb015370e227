"""Moves batches to an accelerator: page-locking, copies on a side stream.

Runs in the consumer, on the thread that calls `next()`.
"""
