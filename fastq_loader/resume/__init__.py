"""An epoch that was stopped goes on: what is remembered of one, as a plain dict and back.

Runs in the consumer, on the thread that calls `iter()`, `next()` and `state_dict()`.
"""
