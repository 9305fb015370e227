"""Resuming a stopped epoch: its state as a plain dict, and a loader restored from one.

Runs in the consumer, on the thread that calls `iter()`, `next()` and `state_dict()`.
"""
