"""Interpretation of a loader's counters: what is slow, what would help, and how much.

Runs in the consumer, when it is asked, and never while a batch is made.
"""
