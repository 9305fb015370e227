"""Interpretation of a loader's counters: the bottleneck, possible improvements, and their gain.

Runs in the consumer, on request, and never while a batch is loaded.
"""
